"""Serve packed checkpoints of a chat model by `vllm serve`, and ask them by the openai client.

    python -m tests.engines.serve smollm2=DIRECTORY
    python -m tests.engines.serve smollm2=DIRECTORY --cases int3 --vllm 0.26.0

Each case is packed once in --work and served on the loopback interface. A completion, a stream and a chat of
32 tokens each are compared with `quantkit.load` in float32 on the same tokens, and the prompt of the chat
with what the tokenizer makes of it by its template. Exit status 1 if one is out of bounds.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from transformers import AutoTokenizer

import quantkit

from .ask import CHAT, TOKENS
from .environments import ROOT, about, add_places, with_vllm
from .run import BOUNDS, VLLM, answer_of, differences

#: Largest difference of log-probabilities. In bfloat16, SmolLM2-135M-Instruct of quantkit differs from its
#: float32 by 0.18 with int4 and by 0.09 dense.
FARTHEST = {"float32": 0.001, "bfloat16": 0.2}
#: Seconds until a server answers, at most.
PATIENCE = 400


@dataclass(frozen=True)
class Case:
    """Arguments of `quantize`, the dtype that vLLM computes in, and whether quantkit's plug-in is loaded."""

    quantize: dict[str, Any]
    dtype: str
    plugin: bool


CASES = {
    # vLLM's kernel for it on a CPU has no float32.
    "int4": Case({"format": "int4", "group_size": 64}, "bfloat16", plugin=False),
    "int4-plugin": Case({"format": "int4", "group_size": 64}, "float32", plugin=True),
    "int3": Case({"format": "int3", "group_size": 64}, "float32", plugin=True),
}


@contextmanager
def served(python: Path, directory: Path, case: Case, log: Path) -> Iterator[str]:
    """Yield the address of a server of `directory`, which ends with the block.

    Raises `RuntimeError` with the end of its output if it ends before it answers, or does not answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", directory, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--dtype", case.dtype, "--max-model-len", "256", "--enforce-eager"]
    command += ["--quantization", "quantkit"] if case.plugin else []
    inside = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", **os.environ, "PYTHONPATH": str(ROOT)}
    # A list of the plug-ins to load.
    inside |= {} if case.plugin else {"VLLM_PLUGINS": "none"}
    with log.open("w") as output:
        server = subprocess.Popen(
            list(map(str, command)), env=inside, stdout=output, stderr=output, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + PATIENCE
            while not _answers(f"{address}/health"):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"no server: {log.read_text()[-2000:]}")
                time.sleep(1)
            yield f"{address}/v1"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


def _answers(address: str) -> bool:
    try:
        with urlopen(address, timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def compare(python: Path, directory: Path, case: Case) -> dict[str, Any]:
    """Return the `differences` of each kind of request, and what was not as expected."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "answers.json"
        with served(python, directory, case, Path(folder) / "log") as address:
            ask = Path(__file__).with_name("ask.py")
            subprocess.run([str(python), str(ask), address, str(file)], check=True, timeout=PATIENCE)
        answers = json.loads(file.read_text())
        found: dict[str, Any] = {}
        for kind, answer in answers.items():
            file.write_text(json.dumps([answer]))
            found[kind] = {**differences(answer_of(file), directory), "text": answer["text"]}
    stream, whole = answers["stream"], answers["completion"]
    found["stream"]["parts"] = stream["parts"]
    found["stream"]["same as completion"] = (stream["text"], stream["tokens"]) == (
        whole["text"],
        whole["tokens"],
    )
    words = AutoTokenizer.from_pretrained(directory)
    ids = words.apply_chat_template(list(CHAT), add_generation_prompt=True, return_dict=True)["input_ids"]
    found["chat"]["prompt by the template"] = ids == answers["chat"]["prompt"]
    return found


def is_within(found: dict[str, Any], dtype: str) -> bool:
    """Return True if all kinds of requests of a case are within the bounds of 96 tokens."""
    fewest, farthest = BOUNDS[dtype][0], FARTHEST[dtype]
    alike = found["stream"]["same as completion"] and found["chat"]["prompt by the template"]
    argmax = sum(one["argmax"] for one in found.values())
    return alike and argmax >= fewest and all(one["max"] <= farthest for one in found.values())


def main() -> int:
    """Pack, serve, ask, compare, print a line for each request."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="NAME=DIRECTORY")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--vllm", default=VLLM, metavar="VERSION")
    add_places(parser)
    arguments = parser.parse_args()
    python = with_vllm(arguments.environments, arguments.vllm)
    arguments.work.mkdir(parents=True, exist_ok=True)
    name, _, source = arguments.model.partition("=")
    found: dict[str, Any] = {}
    for case in arguments.cases:
        options = CASES[case].quantize
        directory = arguments.work / "-".join([name, *map(str, options.values())])
        if not directory.exists():
            quantkit.quantize(source, directory, method="rtn", **options)
        found[case] = {
            "dtype": CASES[case].dtype,
            "plug-in": CASES[case].plugin,
            **compare(python, directory, CASES[case]),
        }
        for kind in ("completion", "stream", "chat"):
            print(f"{case:16} {kind:12} {found[case][kind]}")
    if arguments.json is not None:
        packages = ["vllm-cpu", "openai", "torch", "transformers"]
        table = {
            **about("tests.engines.serve", python, packages),
            "tokens of a request": TOKENS,
            "argmax of": "quantkit.load in float32, on the tokens of vLLM",
            "cases": found,
        }
        arguments.json.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    kinds = {case: {k: v for k, v in one.items() if isinstance(v, dict)} for case, one in found.items()}
    return 0 if all(is_within(kinds[case], CASES[case].dtype) for case in kinds) else 1


if __name__ == "__main__":
    raise SystemExit(main())

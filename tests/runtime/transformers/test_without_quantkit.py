"""What transformers makes of packed checkpoints in a process that does not import quantkit."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import quantkit  # noqa: F401  registers the plug-in
from quantkit.checkpoint.engine_support import support
from quantkit.checkpoint.engines import TRANSFORMERS, Stored
from quantkit.packing.schemes import Scheme

from ...support.compare import assert_close
from ...tiny.packed import SCHEMES, VERSION, Tiny, assert_same_checkpoint, logits_of, write_tiny

#: Answers with what went wrong, if anything did, for each line that it is given. Importing takes seconds.
PLAIN = """
import json, sys, traceback, torch, transformers
for line in sys.stdin:
    source, target, options = json.loads(line)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(source, **eval(options))
        prompt = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            torch.save(model(prompt).logits, target)
        answer = ""
    except Exception:
        answer = traceback.format_exc()
    assert "quantkit" not in sys.modules
    print("answer", json.dumps(answer), flush=True)
"""


@pytest.fixture(scope="module")
def plain() -> Iterator[Callable[[Path, Path, str], str]]:
    """What a process without quantkit says of a checkpoint, whose logits it writes to a file."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PLAIN],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def ask(source: Path, target: Path, options: str = "{}") -> str:
            print(json.dumps([str(source), str(target), options]), file=questions, flush=True)
            for line in answers:
                if line.startswith("answer "):
                    return json.loads(line.removeprefix("answer "))
            raise AssertionError(f"the process ended with {process.wait()}")

        yield ask
    assert process.returncode == 0


DEQUANTIZE = "dict(quantization_config=transformers.CompressedTensorsConfig(dequantize=True))"
BFLOAT16 = "dict(dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "int4"),
        ("llama", "int8"),
        ("llama", "int8-tensor"),
        ("llama", "int2"),
        ("llama", "int3-stream"),
        ("llama", "int4-asym"),
        ("qwen3_moe", "int4"),
        ("qwen3_moe", "int8-tensor"),
    ],
)
@pytest.mark.sampled(2)
def test_plain_transformers_reads_integers(plain, tiny, prompt, tmp_path, family, name):
    pytest.importorskip("compressed_tensors", "0.18" if "stream" in name else None)
    if VERSION < (5, 22) and (family == "qwen3_moe" or "asym" in name):
        pytest.skip("transformers' own compressed-tensors support of this case starts with 5.22")
    checkpoint = tiny(family, name)
    options = DEQUANTIZE if "asym" in name else "{}"
    found = logits_without_quantkit(plain, checkpoint, tmp_path, options)
    expected = logits_of(checkpoint.dense_model(), prompt)
    # Where transformers dequantizes while it loads, it does so in the scales' dtype, bfloat16.
    tolerance = 1e-4 if options == "{}" and family == "llama" else 0.02
    assert_close(found, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("llama", "fp8", "{}"),
        ("llama", "fp8-groups", "{}"),
        ("llama", "fp8-tensor", "{}"),
        ("llama", "fp8-blocks", "{}"),
        ("llama", "fp8", BFLOAT16),
        ("llama", "int2", BFLOAT16),
        ("llama", "int3-stream", BFLOAT16),
        # compressed-tensors dequantizes these to bfloat16, which takes all products of these numbers.
        ("llama", "mxfp8", BFLOAT16),
        ("llama", "mxfp4", BFLOAT16),
        ("llama", "nvfp4", BFLOAT16),
        ("qwen3_moe", "fp8", BFLOAT16),
        ("qwen3_moe", "fp8-tensor", BFLOAT16),
        ("qwen3_moe", "mxfp4", BFLOAT16),
    ],
)
def test_plain_transformers_computes_the_same(plain, tiny, prompt, tmp_path, family, name, options):
    pytest.importorskip("compressed_tensors", "0.18" if "stream" in name else None)
    if VERSION < (5, 22) and family == "qwen3_moe":
        pytest.skip("transformers' own compressed-tensors support of this case starts with 5.22")
    checkpoint = tiny(family, name)
    assert checkpoint.quantization_config["quant_method"] == "compressed-tensors"
    found = logits_without_quantkit(plain, checkpoint, tmp_path, options)
    dtype = torch.bfloat16 if options == BFLOAT16 else torch.float32
    expected = logits_of(checkpoint.dense_model(dtype), prompt)
    assert_close(found.float(), expected, rtol=0, atol=0)
    # And quantkit computes the same from the same files. In bfloat16, experts whose scores are close are
    # chosen by how products are rounded.
    for own in {torch.float32} if family == "qwen3_moe" else {torch.float32, dtype}:
        ours = AutoModelForCausalLM.from_pretrained(checkpoint.packed, dtype=own)
        expected = logits_of(checkpoint.dense_model(own), prompt)
        tolerance = 1e-4 if own == torch.float32 else 0.05 * expected.abs().max().item()
        assert_close(logits_of(ours, prompt), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("head", ["int4", "int8"])
def test_plain_transformers_reads_a_packed_head(plain, prompt, tmp_path, head):
    pytest.importorskip("compressed_tensors")
    schemes = {"lm_head": SCHEMES[head]}
    checkpoint = write_tiny(
        tmp_path / "model", "llama", lambda name: schemes.get(name, SCHEMES["int4"]), pack_head=True
    )
    found = logits_without_quantkit(plain, checkpoint, tmp_path, "{}")
    assert_close(found, logits_of(checkpoint.dense_model(), prompt), rtol=1e-5, atol=1e-4)


MIXES = {
    "linears": (
        "llama",
        {"q_proj": "mxfp4", "k_proj": "nvfp4", "down_proj": "int4", "o_proj": "mxfp8"},
        "fp8",
    ),
    "experts": ("qwen3_moe", {"experts": "int4"}, "fp8"),
}


@pytest.mark.parametrize("mix", MIXES)
def test_plain_transformers_reads_a_mix_of_formats(plain, prompt, tmp_path, mix):
    pytest.importorskip("compressed_tensors")
    family, chosen, default = MIXES[mix]
    if VERSION < (5, 22) and family == "qwen3_moe":
        pytest.skip("transformers' own compressed-tensors support of this case starts with 5.22")

    def scheme_of(module: str) -> Scheme:
        return SCHEMES[next((name for part, name in chosen.items() if part in module), default)]

    checkpoint = write_tiny(tmp_path / "mixed", family, scheme_of)
    assert checkpoint.quantization_config["format"] == "mixed-precision"
    found = logits_without_quantkit(plain, checkpoint, tmp_path, BFLOAT16)
    expected = logits_of(checkpoint.dense_model(torch.bfloat16), prompt)
    assert_close(found.float(), expected, rtol=0, atol=0)
    ours = AutoModelForCausalLM.from_pretrained(checkpoint.packed)
    expected = logits_of(checkpoint.dense_model(), prompt)
    assert_close(logits_of(ours, prompt), expected, rtol=0, atol=1e-4)
    ours.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", checkpoint.packed)


def test_experts_that_no_engine_reads_need_quantkit(plain, tiny, tmp_path):
    checkpoint = tiny("qwen3_moe", "fp8-groups")
    assert checkpoint.quantization_config["quant_method"] == "quantkit"
    assert "mismatch" in plain(checkpoint.packed, tmp_path / "logits.pt").lower()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_experts_that_other_engines_read_are_misread_as_the_table_says(plain, tiny, prompt, tmp_path, name):
    pytest.importorskip("compressed_tensors")
    checkpoint = tiny("qwen3_moe", name)
    config = checkpoint.quantization_config
    assert config["quant_method"] == "compressed-tensors"
    group = next(iter(config["config_groups"].values()))
    row = support(TRANSFORMERS, Stored.of("e", "experts", group["format"], group["weights"], 32))
    assert not row.classes
    expected = logits_of(checkpoint.dense_model(), prompt)
    ours = AutoModelForCausalLM.from_pretrained(checkpoint.packed, dtype=torch.float32)
    assert_close(logits_of(ours, prompt), expected, rtol=0, atol=1e-4)
    if VERSION >= (5, 23):
        answer = plain(checkpoint.packed, tmp_path / "logits.pt", BFLOAT16)
        assert (answer == "") is ("says nothing" in row.why)
        if answer == "":
            found = torch.load(tmp_path / "logits.pt", weights_only=True).float()
            assert (found - expected).norm() > expected.norm() / 2


def logits_without_quantkit(
    plain: Callable[..., str], checkpoint: Tiny, tmp_path: Path, options: str
) -> torch.Tensor:
    assert plain(checkpoint.packed, tmp_path / "logits.pt", options) == ""
    found: torch.Tensor = torch.load(tmp_path / "logits.pt", weights_only=True)
    return found


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("name", ["fp6", "binary"])
def test_plain_transformers_refuses_other_formats(plain, tiny, tmp_path, family, name):
    checkpoint = tiny(family, name)
    found = plain(checkpoint.packed, tmp_path / "logits.pt")
    assert "mismatch" in found.lower()
    assert not (tmp_path / "logits.pt").exists()
    if VERSION >= (5, 24):
        page = (Path(__file__).parents[3] / "docs" / "guide" / "transformers.md").read_text()
        assert found.splitlines()[-1] in page, "the page shows another error"

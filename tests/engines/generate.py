"""Generate with vLLM from each directory, in one process: `python generate.py OPTIONS ANSWERS DIRECTORY...`.

OPTIONS are JSON arguments of `vllm.LLM`. Writes ids and log-probabilities of three prompts, or the error, to
a file of the folder ANSWERS for each directory. `run.py` calls it in an environment with vLLM.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

PROMPTS = ("The history of the", "She opened the door and", "import numpy as np\n")
TOKENS = 32


def generate(directory: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the greedy continuation of each prompt."""
    from vllm import LLM, SamplingParams

    # vLLM takes at least 1 GiB for keys and values unless it is told, and 0.26.0 does not give it back.
    small = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 64 << 20}
    model = LLM(model=directory, disable_log_stats=True, **small, **options)
    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, ignore_eos=True)
    rows = []
    for answer in model.generate(list(PROMPTS), sampling, use_tqdm=False):
        found = answer.outputs[0]
        chosen = [of[token].logprob for of, token in zip(found.logprobs, found.token_ids, strict=True)]
        rows.append(
            {
                "prompt": list(answer.prompt_token_ids),
                "tokens": list(found.token_ids),
                "logprobs": chosen,
            }
        )
    return rows


def main() -> None:
    """Run each directory; go on after one that fails."""
    options, answers = json.loads(sys.argv[1]), Path(sys.argv[2])
    for directory in map(Path, sys.argv[3:]):
        try:
            answer: Any = generate(str(directory), options)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        (answers / f"{directory.name}.json").write_text(json.dumps(answer), encoding="utf-8")
        gc.collect()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # A core for each rank: by itself vLLM asks for a NUMA node for each.
    ranks = json.loads(sys.argv[1]).get("tensor_parallel_size", 1)
    if ranks > 1:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, range(ranks))))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Several models, one after the other, in this process.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()

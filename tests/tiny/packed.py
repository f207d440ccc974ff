"""Tiny packed checkpoints and the dense models they stand for."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor, quantize_units

from ..support.compare import assert_equal
from .sizes import SIZES, made_once

VOCAB = 96
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))

SCHEMES: dict[str, Scheme] = {
    "int4": scheme("int4", group_size=32),
    "int4-asym": scheme("int4", group_size=32, zero_point="integer"),
    "int4-fp32": scheme("int4", group_size=32, scale_dtype=torch.float32),
    "int4-ragged": scheme("int4", group_size=48),
    "int8": scheme("int8"),
    "int8-asym": scheme("int8", group_size=32, zero_point="integer"),
    "fp6": scheme("fp6", group_size=32, scale_dtype=torch.float16),
    "fp6-wide": scheme("fp6", group_size=128),
    "binary": scheme("binary", group_size=64),
    "ternary-radix": scheme("ternary", group_size=32, packing="radix"),
    "int2": scheme("int2", group_size=32),
    "int3-stream": scheme("int3", group_size=32, packing="stream"),
    "fp8": scheme("fp8"),
    "fp8-groups": scheme("fp8", group_size=32, scale_dtype=torch.float16),
    "fp8-blocks": Scheme(scheme("fp8").format, 32, scale_dtype=torch.float32, group_rows=16),
    "fp8-tensor": scheme("fp8", group_size="tensor"),
    "int8-tensor": scheme("int8", group_size="tensor"),
    "ternary-tensor": scheme("ternary", group_size="tensor", packing="radix"),
    "mxfp8": scheme("mxfp8"),
    "mxfp4": scheme("mxfp4"),
    "nvfp4": scheme("nvfp4"),
}

_SIZES: dict[str, Any] = {
    **SIZES,
    "vocab_size": VOCAB,
    "intermediate_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 16, "sliding_window": 32}),
    "gemma3": ("Gemma3TextConfig", {"query_pre_attn_scalar": 16, "sliding_window": 32}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", _MOE),
}

_LINEAR = re.compile(r"\.(q|k|v|o|gate|up|down)_proj$|\.w[123]$")
_EXPERT = re.compile(r"\.(?:mlp|block_sparse_moe)\.experts\.\d+\.(\w+)$")
_FUSED = {"w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}


def encode_groups(
    groups: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme
) -> torch.Tensor:
    """Codes uint8 [R, g] of groups float32 [R, g]; a scale of zero means a group of zeros."""
    return quantize_units(groups / torch.where(scale == 0, 1.0, scale), zero_point, scheme)[0]


def config_of(family: str, **changes: Any) -> Any:
    name, fields = FAMILIES[family]
    return getattr(transformers, name)(**{**_SIZES, **fields, **changes})


def together(weights: Iterable[str], *, experts: bool = True) -> list[list[str]]:
    """The names of q, k and v, of gate and up, and the others one by one; those of experts if `experts`."""
    sets: dict[str, list[str]] = {}
    for name in weights:
        key = re.sub(
            r"\b([qkv]_proj|gate_proj|up_proj)\b", lambda m: "qkv" if m[0][1] == "_" else "gate_up", name
        )
        sets.setdefault(key if experts or ".experts." not in name else name, []).append(name)
    return list(sets.values())


def absmax_pack(weight: torch.Tensor, scheme: Scheme) -> PackedTensor:
    """Round-to-nearest: float32 [N, K] on a grid from each group's extremes."""
    rows, columns = weight.shape
    scheme = scheme.for_columns(columns)
    size = scheme.group_columns(columns)
    factor = torch.tensor([512.0]) if scheme.global_scale else None
    padded = torch.nn.functional.pad(weight, (0, -columns % size)) * (1 if factor is None else factor)
    groups = padded.reshape(-1, size)
    zero = None
    if scheme.zero_point == "none":
        scale = groups.abs().amax(1, keepdim=True) / scheme.format.absmax
    else:
        low, high = groups.amin(1, keepdim=True).clamp(max=0), groups.amax(1, keepdim=True).clamp(min=0)
        scale = (high - low) / (2**scheme.format.bits - 1)
    if scheme.per_tensor:
        scale = scale.amax().view(1)
    if scheme.group_rows > 1:
        scale = torch.stack([rows.amax(0) for rows in scale.view(rows, -1).split(scheme.group_rows)])
    stored_scale = scale = scheme.scale_type.round(scale)
    if not scheme.per_tensor:
        stored_scale = scale.view(-(-rows // scheme.group_rows), -1)
        scale = scheme.row_scale(stored_scale, rows).reshape(-1, 1)
    if scheme.zero_point == "integer":
        zero = torch.round(-low / scale.float())
    codes = encode_groups(groups, scale.float(), zero, scheme).reshape(rows, -1)[:, :columns]
    packed_zero = None if zero is None else zero.to(torch.uint8).reshape(rows, -1)
    codes = codes.contiguous()
    return PackedTensor.from_codes(codes, stored_scale, packed_zero, scheme, factor)


@dataclass(frozen=True)
class Tiny:
    """A packed checkpoint and a dense one with the dequantized weights."""

    packed: Path
    dense: Path

    @property
    def quantization_config(self) -> dict[str, Any]:
        return json.loads((self.packed / "config.json").read_text())["quantization_config"]

    def tensors(self) -> dict[str, torch.Tensor]:
        return load_file(self.packed / "model.safetensors")

    def rewrite(self, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, self.packed / "model.safetensors", metadata={"format": "pt"})

    def dense_model(self, dtype: torch.dtype = torch.float32) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.dense, dtype=dtype).eval()


def write_tiny(
    directory: Path,
    family: str,
    scheme: Scheme | Callable[[str], Scheme | None],
    *,
    pack_head: bool = False,
    **changes: Any,
) -> Tiny:
    """Write a random model of `family` packed and, with the same weights, dense."""
    tiny = Tiny(directory / "packed", directory / "dense")

    def make() -> None:
        _write_tiny(tiny, family, scheme if callable(scheme) else lambda module: scheme, pack_head, changes)

    if callable(scheme):
        make()
    else:
        made_once(directory, ("tiny", family, scheme, pack_head, sorted(changes.items())), make)
    return tiny


def _write_tiny(
    tiny: Tiny,
    family: str,
    scheme_of: Callable[[str], Scheme | None],
    pack_head: bool,
    changes: dict[str, Any],
) -> None:
    packed_dir, dense_dir = tiny.packed, tiny.dense
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family, **changes)).float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(dense_dir)
    tensors = load_file(dense_dir / "model.safetensors")

    stored: dict[str, list[str]] = {}
    for name in tensors:
        base = name.removesuffix(".weight")
        if _LINEAR.search(base) or (base == "lm_head" and pack_head):
            expert = _EXPERT.search(base)
            module = base if expert is None else f"{base[: expert.start()]}.mlp.experts.{_FUSED[expert[1]]}"
            stored.setdefault(module, []).append(base)
    assignments = [
        Assignment(
            module,
            tuple(names),
            tuple(tensors[f"{names[0]}.weight"].shape),
            scheme_of(module),
            module == "lm_head",
        )
        for module, names in stored.items()
    ]
    skipped = [name for name in ("lm_head",) if name not in stored]
    assignments += [Assignment(name, (name,), (VOCAB, 64), None) for name in skipped]
    config = QuantizationConfig.from_assignments(assignments)

    packed_tensors = dict(tensors)
    for assignment in assignments:
        for base in assignment.stored:
            if assignment.scheme is None:
                continue
            weight = packed_tensors.pop(f"{base}.weight")
            packed = absmax_pack(weight.float(), assignment.scheme)
            tensors[f"{base}.weight"] = packed.dequantize().to(weight.dtype).contiguous()
            stored = stored_format(packed.scheme, packed.shape[1], config.container)
            parts = {**dict(packed.parts()), "shape": torch.tensor(packed.shape, dtype=torch.int64)}
            for part in stored.shapes(packed.scheme.storage_shapes(packed.shape)):
                name = stored.part_name(f"{base}.weight", part)
                packed_tensors[name] = stored.to_file(part, parts[part])
    save_file(tensors, dense_dir / "model.safetensors", metadata={"format": "pt"})
    packed_dir.mkdir()
    save_file(packed_tensors, packed_dir / "model.safetensors", metadata={"format": "pt"})
    base_config = json.loads((dense_dir / "config.json").read_text())
    base_config["quantization_config"] = config.to_dict(assignments)
    (packed_dir / "config.json").write_text(json.dumps(base_config, indent=2, sort_keys=True))


#: Half of a tiny model on disk. By hand, because 5.12 does not dispatch a model that is all on disk.
HALF_ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "cpu",
    "lm_head": "cpu",
}


def logits_of(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt).logits.float()


def run_python(
    code: str, *arguments: str, check: bool = True, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})},
        check=False,
    )
    assert not check or result.returncode == 0, result.stderr
    return result


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    tensors, wanted = (load_file(directory / "model.safetensors") for directory in (found, expected))
    assert_equal(tensors, wanted)
    configs = [json.loads((directory / "config.json").read_text()) for directory in (found, expected)]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]

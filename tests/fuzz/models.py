"""Whole checkpoints as fuzz targets: what transformers makes of them counts too, so a case takes longer."""

import json
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.hf_files import explained
from quantkit.model.structure import read_structure
from quantkit.model.tokenizer import tokenize, tokenizer
from quantkit.packing.names import QUANTKIT
from quantkit.packing.schemes import Scheme, scheme
from quantkit.runtime import load as loading
from quantkit.runtime.load import load

from .files import packed_parts, write_items
from .mutate import Item, pack_directory, unpack_directory

VOCABULARY = 40
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "norm_topk_prob": True}
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "qwen3_moe": ("Qwen3MoeConfig", _EXPERTS),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 16, "sliding_window": 32}),
}


def dense_model(family: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors of a small model."""
    import transformers

    name, changes = _FAMILIES[family]
    config = getattr(transformers, name)(**_SIZES, **changes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    return json.loads(config.to_json_string(use_diff=False)), tensors


@cache
def dense_checkpoints() -> tuple[bytes, ...]:
    """The config of each family with its header; the data of tensors is zeros, which nobody reads."""
    seeds = []
    for family in _FAMILIES:
        config, tensors = dense_model(family)
        zeros = {name: torch.zeros(tensor.shape, dtype=torch.float16) for name, tensor in tensors.items()}
        seeds.append(_directory(config, zeros))
    return tuple(seeds)


def _directory(config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], **more: Item) -> bytes:
    # Saved by the model under its own architecture: what `from_pretrained` looks at first.
    files: dict[str, Item] = {"config.json": json.dumps(config).encode(), **more}
    return pack_directory({**files, "model.safetensors": save(dict(tensors), {"format": "pt"})})


@cache
def packed_checkpoints() -> tuple[bytes, ...]:
    """Llamas of one block: in quantkit's container, and as compressed-tensors."""
    return (
        _packed("quantkit", {"": scheme("fp6", group_size=16), "o_proj": scheme("nvfp4")}),
        _packed("compressed-tensors", {"": scheme("int4", group_size=16), "o_proj": scheme("int8")}),
    )


def _packed(container: Any, schemes: Mapping[str, Scheme]) -> bytes:
    from quantkit.checkpoint.compressed_tensors import stored_format

    config, tensors = dense_model("llama")
    assignments = []
    for i, name in enumerate([name for name in tensors if name.endswith("_proj.weight")]):
        weight, module = tensors.pop(name), name.removesuffix(".weight")
        shape = (weight.shape[0], weight.shape[1])
        one = next((s for key, s in schemes.items() if key and key in name), schemes[""]).for_columns(
            shape[1]
        )
        assignments.append(Assignment(module, (module,), shape, one))
        stored = QUANTKIT if container == "quantkit" else stored_format(one, shape[1], container)
        parts = packed_parts(one, shape, i)
        for part in stored.shapes(one.storage_shapes(shape)):
            small = parts[part] / 64 if part == "scale" and one.scale_dtype == torch.bfloat16 else parts[part]
            tensors[stored.part_name(name, part)] = stored.to_file(part, small)
    assignments.append(Assignment("lm_head", ("lm_head",), (VOCABULARY, 32), None))
    written = QuantizationConfig.from_assignments(assignments)
    assert written.container == container
    config["quantization_config"] = written.to_dict(assignments)
    return _directory(config, tensors)


def check_structure(case: bytes, directory: Path) -> None:
    write_items(directory, unpack_directory(case))
    checkpoint = Checkpoint.open(directory)
    structure = read_structure(checkpoint)
    stored = {f"{one}.weight" for linear in structure.linears.values() for one in linear.stored}
    for linear in structure.linears.values():
        for one in linear.stored:
            assert linear.kind == "lm_head" or checkpoint.tensors[f"{one}.weight"].shape == linear.shape
    assert stored | structure.dense.keys() >= checkpoint.tensors.keys()


def check_load(case: bytes, directory: Path) -> None:
    write_items(directory, unpack_directory(case))
    model = load(directory, device="cpu", dtype=torch.float32)
    with torch.no_grad(), explained(directory):
        logits = model(torch.tensor([[1, 5, 7, 3]])).logits
    if not bool(logits.isfinite().all()):
        _expect_reason(directory)


def _expect_reason(directory: Path) -> None:
    """Logits that are no numbers have a weight, scale or setting that is none, or is huge."""
    checkpoint = Checkpoint.open(directory)
    extreme = False
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        if tensor.is_floating_point():
            extreme |= not float(tensor.float().abs().max()) < 1e4
        # fp8, fp6 and fp4 codes and 8-bit scales as words: any bytes may be NaN.
        extreme |= tensor.dtype in (torch.uint8, torch.int32) and "scale" in name
    changed = {key for key, value in checkpoint.config.items() if not _plain(value)}
    assert extreme or changed, "logits that are no numbers, of weights that are"


def _plain(value: Any) -> bool:
    """Whether a setting is none that could make a model overflow."""
    if isinstance(value, dict):
        return all(map(_plain, value.values()))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return math.isfinite(value) and value > 0 and 1e-7 < value < 1e5
    return True


@cache
def tokenizers() -> tuple[bytes, ...]:
    """A tokenizer of words, as transformers saves it."""
    import tempfile

    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(1, VOCABULARY)} | {"<pad>": 0}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="w1")
    with tempfile.TemporaryDirectory() as folder:
        made.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}
    config = {"model_type": "llama", **_SIZES}
    return (pack_directory({"config.json": json.dumps(config).encode(), **files}),)


def check_tokenizer(case: bytes, directory: Path) -> None:
    write_items(directory, unpack_directory(case))
    found = tokenizer(directory)
    ids = tokenize(found, "w3 w4 nonsense")
    assert ids.dtype == torch.int64 and ids.dim() == 1
    with explained(directory):
        text = found.decode(ids.tolist())
    if not isinstance(text, str):
        raise CheckpointError(f"{directory}: the tokenizer decodes to {type(text).__name__}, not to text.")


def generation_configs() -> tuple[bytes, ...]:
    """What `generation_config.json` holds."""
    common = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "transformers_version": "5.0.0"}
    sampled = {"do_sample": True, "temperature": 0.6, "top_k": 50, "top_p": 0.9, "max_new_tokens": 32}
    beams = {"num_beams": 4, "length_penalty": 1.0, "early_stopping": True, "cache_implementation": "static"}
    return tuple(json.dumps({**common, **more}).encode() for more in (sampled, beams))


def check_generation(case: bytes, directory: Path) -> None:
    path = directory / loading.GENERATION_CONFIG_NAME
    path.write_bytes(case)
    with explained(directory):
        found = loading.read_generation_config(path)
    said = json.loads(case)
    for name in ("temperature", "top_k", "top_p", "max_new_tokens", "num_beams"):
        if name in said and said[name] is not None:
            assert getattr(found, name) == said[name] or said[name] != said[name], name

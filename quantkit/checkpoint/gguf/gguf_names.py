"""Map llama.cpp's tensor names and transformations to transformers', one table row per architecture."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.gguf.header import GgufHeader, GgufTensor
from quantkit.errors import CheckpointError

ARCHITECTURE_KEY = "general.architecture"


@dataclass(frozen=True)
class Architecture:
    """Tensor names of one `general.architecture` in llama.cpp, and how it transforms tensors.

    layer      names within a layer: from llama.cpp's to transformers' within `model.layers.N`
    experts    names of tensors [E, N, K] with all experts, mapped likewise; `{}` is the expert's number
    permuted   llama.cpp's names of tensors whose rows are permuted per head, to interleave rotary halves;
               each is mapped to the metadata key of the number of heads
    added      constant that llama.cpp adds to weights whose name ends in `norm`
    column     llama.cpp's names of vectors that are one-row matrices in transformers
    config     metadata keys that transformers' own conversion omits, mapped to keys of config.json
    exported   model types of transformers that `export` writes as this architecture
    fixed      fields of config.json that files lack, with the value that llama.cpp uses
    biased     llama.cpp's names of tensors whose bias it reads, if present
    rotary     kinds of rotary embeddings of llama.cpp; 'llama3' is a tensor of factors
    own_heads  True if the size of a head may be another than `hidden_size / num_attention_heads`
    """

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)
    permuted: Mapping[str, str] = field(default_factory=dict)
    added: float = 0.0
    column: frozenset[str] = frozenset()
    config: Mapping[str, str] = field(default_factory=dict)
    exported: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    biased: frozenset[str] = frozenset()
    rotary: frozenset[str] = frozenset({"default"})
    own_heads: bool = True


_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_QKV = frozenset({"attn_q", "attn_k", "attn_v"})
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_DENSE = {**_ATTENTION, **_GATED}
_EXPERTS = {f"ffn_{one}_exps": f"mlp.experts.{{}}.{one}_proj" for one in ("gate", "up", "down")}
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{f"ffn_{one}_shexp": f"mlp.shared_expert.{one}_proj" for one in ("gate", "up", "down")},
}
_HEAD_SIZE = {"attention.key_length": "head_dim"}
_EXPERT_SIZE = {"expert_feed_forward_length": "moe_intermediate_size"}
_GEMMA = {
    **_DENSE,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

#: Architectures by their name in files. To add one, add a row.
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        _DENSE,
        permuted={"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"},
        exported=("llama", "mistral"),
        biased=_QKV | {"attn_output", *_GATED},
        rotary=frozenset({"default", "llama3"}),
    ),
    "qwen2": Architecture(_DENSE, exported=("qwen2",), biased=_QKV, own_heads=False),
    "qwen3": Architecture({**_DENSE, **_HEAD_NORMS}, config=_HEAD_SIZE, exported=("qwen3",)),
    "qwen2moe": Architecture(
        {**_ATTENTION, **_SHARED, "ffn_gate_inp": "mlp.gate"},
        _EXPERTS,
        column=frozenset({"ffn_gate_inp_shexp"}),
        config={**_EXPERT_SIZE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        exported=("qwen2_moe",),
        fixed={"norm_topk_prob": False},
        biased=_QKV,
        own_heads=False,
    ),
    "qwen3moe": Architecture(
        {**_ATTENTION, **_HEAD_NORMS, "ffn_gate_inp": "mlp.gate"},
        _EXPERTS,
        config=_EXPERT_SIZE,
        exported=("qwen3_moe",),
        fixed={"norm_topk_prob": True},
    ),
    "gemma2": Architecture(_GEMMA, added=1.0),
    "gemma3": Architecture({**_GEMMA, **_HEAD_NORMS}, added=1.0),
    "phi3": Architecture(
        {
            **_ATTENTION,
            "attn_qkv": "self_attn.qkv_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "starcoder2": Architecture({**_ATTENTION, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    "stablelm": Architecture(_DENSE),
    "nemotron": Architecture({**_ATTENTION, "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}, added=1.0),
}
MAX_EXPERTS = 4096
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
#: Constants of rotary embeddings, which transformers computes itself.
ROTARY = re.compile(r"(blk\.\d+\.)?rope_(freqs|factors_(long|short))\.weight")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
#: The same of transformers' names.
_MODEL_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?<=\.experts\.)\d+")


@dataclass(frozen=True)
class Named:
    """Matrix or vector of the model, as part of a tensor of the file.

    name     transformers' name
    tensor   name in the file
    part     expert whose rows it has, None for all rows
    heads    as in `GgufRows`
    added    constant to subtract from its weights
    is_row   True if a vector of the file is a matrix of one row
    """

    name: str
    tensor: GgufTensor
    part: int | None = None
    heads: int | None = None
    added: float = 0.0
    is_row: bool = False


@dataclass(frozen=True)
class Place:
    """Place of a transformers tensor in llama.cpp: the whole tensor `name`, or only its expert `part`.

    `heads` is the metadata key of the number of heads; None if rows are not permuted. `is_row` is True for
    a matrix of one row, a vector in the file.
    """

    name: str
    part: int | None = None
    heads: str | None = None
    is_row: bool = False


def place(arch: Architecture, name: str) -> Place | None:
    """Return the place of the transformers tensor `name`, the inverse of `named`; None if `arch` has none."""
    stem, _, leaf = name.rpartition(".")
    for theirs, ours in _TOP.items():
        if ours == stem:
            return Place(f"{theirs}.{leaf}")
    match = _MODEL_LAYER.fullmatch(name)
    if match is None:
        return None
    number, within, leaf = match.groups()
    expert = _EXPERT.search(within)
    pattern = _EXPERT.sub("{}", within)
    names = {ours: theirs for theirs, ours in (arch.experts if expert else arch.layer).items()}
    if pattern not in names:
        return None
    found = names[pattern]
    if leaf == "bias" and found not in arch.biased:
        return None
    part = None if expert is None else int(expert[0])
    heads = arch.permuted.get(found)
    return Place(f"blk.{number}.{found}.{leaf}", part, heads, found in arch.column)


def exported_as(model_type: str) -> tuple[str, Architecture] | None:
    """Return the name and row of the architecture that `export` writes for `model_type`; None if none."""
    rows = ARCHITECTURES.items()
    return next(((name, row) for name, row in rows if model_type in row.exported), None)


def architecture(header: GgufHeader) -> Architecture:
    """Return the row of `ARCHITECTURES` for a file; raise `CheckpointError` if there is none."""
    name = header.get(ARCHITECTURE_KEY, str, "")
    found = ARCHITECTURES.get(name)
    experts = header.get(f"{name}.expert_count", int, 0)
    if found is None or (experts and not found.experts):
        of_experts = " with experts" if found is not None else ""
        raise CheckpointError(
            f"{header.path}: {ARCHITECTURE_KEY} is {name!r}{of_experts}; quantkit knows the names of "
            f"{', '.join(ARCHITECTURES)}. Use the safetensors checkpoint that the file was made from."
        )
    return found


def named(header: GgufHeader) -> Iterator[Named]:
    """Yield every tensor of the model in a file, by transformers' names.

    Skips constants of rotary embeddings. Raises `CheckpointError` for a tensor unknown to the model.
    """
    arch = architecture(header)
    for tensor in header.tensors.values():
        if ROTARY.fullmatch(tensor.name) is None:
            yield from _named(header, arch, tensor)


def _named(header: GgufHeader, arch: Architecture, tensor: GgufTensor) -> Iterator[Named]:
    stem, _, leaf = tensor.name.rpartition(".")
    added = arch.added if stem.endswith("norm") and leaf == "weight" else 0.0
    if stem in _TOP and leaf in ("weight", "bias"):
        yield Named(f"{_TOP[stem]}.{leaf}", tensor, added=added)
        return
    match = _LAYER.fullmatch(tensor.name)
    number, within, _ = match.groups() if match else ("", "", "")
    prefix = f"model.layers.{number}."
    if within in arch.layer:
        heads = _heads(header, tensor, arch.permuted[within]) if within in arch.permuted else None
        is_row = within in arch.column and len(tensor.shape) == 1
        yield Named(f"{prefix}{arch.layer[within]}.{leaf}", tensor, None, heads, added, is_row)
    elif within in arch.experts and len(tensor.shape) == 3 and tensor.shape[0] <= MAX_EXPERTS:
        for expert in range(tensor.shape[0]):
            yield Named(f"{prefix}{arch.experts[within].format(expert)}.{leaf}", tensor, expert)
    else:
        raise CheckpointError(
            f"{header.path}: quantkit does not know where tensor {tensor.name!r} of shape {tensor.shape} is "
            f"in a model of {header.get(ARCHITECTURE_KEY, str)!r}. Use the safetensors checkpoint that the "
            "file was made from."
        )


def _heads(header: GgufHeader, tensor: GgufTensor, key: str) -> int:
    """Return the number of heads of a tensor, metadata `key`, or else the number of query heads.

    Raises `CheckpointError` unless each has pairs of rows.
    """
    prefix = header.get(ARCHITECTURE_KEY, str)
    count = header.get(f"{prefix}.{key}", int, header.get(f"{prefix}.attention.head_count", int, 0))
    if count < 1 or tensor.shape[0] % (2 * count):
        raise CheckpointError(
            f"{header.path}: tensor {tensor.name!r} has {tensor.shape[0]} rows for {count} heads; expected "
            "pairs of rows in each head. Download the file again."
        )
    return int(count)

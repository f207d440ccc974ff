"""Rotate a checkpoint while it is read, so that no later step needs to know.

The residual stream x becomes x Q, and the values v of each head v R (QuaRot, arXiv 2404.00456; SpinQuant,
arXiv 2405.16406, calls them R1 and R2). Linears that read a rotated space are multiplied by its rotation,
those that write it by the transpose on the other side. An RMSNorm commutes with Q once its weight is 1, so
its weight is folded into the linears after it. The model computes the same with the same architecture:
nothing is rotated at inference.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from quantkit.calibrate.hadamard import Rotation
from quantkit.calibrate.methods import CHUNK_WEIGHTS
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError
from quantkit.model.architectures import LLAMA_LIKE
from quantkit.model.model_class import model_config
from quantkit.model.structure import NOT_A_PARAMETER, QUANTIZABLE_DTYPES, Structure, read_structure

Space = Literal["residual", "heads"]


@dataclass(frozen=True)
class Place:
    """Rotations of the tensors that match a name.

    names     regular expression for the name after the layer number, if any
    columns   rotated space of the inputs of a matrix; None if not rotated
    rows      rotated space of the outputs, or of a bias; in "heads" the last rows are the values, even if q
              and k are stacked above them
    norm      parameter of the same layer by which the columns are multiplied before the rotation
    is_norm   True for the weight of a norm, which becomes 1
    """

    names: str
    columns: Space | None = None
    rows: Space | None = None
    norm: str | None = None
    is_norm: bool = False


_LAYER = re.compile(r"^layers\.\d+\.")
_MLP = r"(mlp|block_sparse_moe)\.(experts\.\d+\.|shared_expert\.)?"

PLACES = (
    Place(r"embed_tokens\.weight", columns="residual"),
    Place(r"lm_head\.weight", columns="residual", norm="norm.weight"),
    Place(r"(norm|input_layernorm|post_attention_layernorm)\.weight", is_norm=True),
    Place(r"self_attn\.[qk]_proj\.weight", columns="residual", norm="input_layernorm.weight"),
    Place(
        r"self_attn\.(v|qkv)_proj\.weight", columns="residual", rows="heads", norm="input_layernorm.weight"
    ),
    Place(r"self_attn\.v_proj\.bias", rows="heads"),
    Place(r"self_attn\.o_proj\.weight", columns="heads", rows="residual"),
    Place(
        _MLP + r"((gate|up|gate_up)_proj|w1|w3|gate|shared_expert_gate)\.weight",
        columns="residual",
        norm="post_attention_layernorm.weight",
    ),
    Place(_MLP + r"(down_proj|w2)\.weight", rows="residual"),
    Place(r"(self_attn\.o|mlp\.down)_proj\.bias", rows="residual"),
    Place(r"self_attn\.([qk]_proj\.bias|[qk]_norm\.weight)|mlp\.(gate|up)_proj\.bias"),
)


@dataclass(frozen=True, kw_only=True)
class RotatedCheckpoint(Checkpoint):
    """Tensors of a checkpoint, rotated; config, names, shapes and dtypes are those of the output.

    spaces      rotation of the "residual" stream, and of the values of a head, "heads"
    places      rotations of each tensor that changes, by its name
    value_rows  number of output rows of the values

    Changed matrices are at least float32, so packing adds the only rounding; dense storage rounds to the
    dtype of the header.
    """

    spaces: Mapping[Space, Rotation]
    places: Mapping[str, Place]
    value_rows: int

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        place = self.places.get(name)
        if place is None:
            return super().read(name, start, stop)
        if place.is_norm:
            return torch.ones_like(super().read(name, start, stop))
        if self.tensors[name].whole:
            return self._turned(super().read(name), place)[start:stop]
        return self._turned(super().read(name, start, stop), place)

    def _turned(self, stored: torch.Tensor, place: Place) -> torch.Tensor:
        """Rotate the rows, columns or both of a tensor as `place` says, in float64, some at a time."""
        found = stored.to(torch.promote_types(stored.dtype, torch.float32))
        if place.columns is not None:
            scale = torch.ones(()) if place.norm is None else super().read(place.norm)
            for rows in torch.split(found, max(1, CHUNK_WEIGHTS // found.shape[1])):
                rows.copy_(self.spaces[place.columns].apply(rows.double() * scale))
        if place.rows is not None:
            outputs = found[-self.value_rows :] if place.rows == "heads" else found
            matrix = outputs.view(len(outputs), -1)
            for columns in torch.split(matrix, max(1, CHUNK_WEIGHTS // len(matrix)), 1):
                columns.copy_(self.spaces[place.rows].apply(columns.double().T).T)
        return found if found.dim() > 1 else found.to(stored.dtype)

    def fingerprint(self, *, of_copies: bool = False) -> str:
        """Return a fingerprint of the files and of the rotation."""
        return hashlib.sha256(f"rotated {super().fingerprint(of_copies=of_copies)}".encode()).hexdigest()


def rotated(checkpoint: Checkpoint) -> RotatedCheckpoint:
    """Return `checkpoint` rotated, under the names of its model. Reads no weights.

    A tied lm_head becomes a tensor of its own, as only it takes the final norm. Raises `CheckpointError` for
    a family outside `LLAMA_LIKE`, for feature counts without a known Hadamard matrix, and for tensors with
    unknown roles.
    """
    kind = checkpoint.config.get("model_type")
    if kind not in LLAMA_LIKE:
        raise _refusal(
            checkpoint,
            f"the model_type is {kind!r}, of which it does not know that nothing but linears and RMSNorms "
            f"touches the residual stream; it does of {', '.join(sorted(LLAMA_LIKE))}",
        )
    structure = read_structure(checkpoint)
    assert structure.embedding is not None
    config = model_config(checkpoint.config, checkpoint.directory)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    spaces: dict[Space, Rotation] = {
        "residual": _rotation(checkpoint, config.hidden_size, "the hidden size"),
        "heads": _rotation(checkpoint, head, "the size of a head"),
    }
    notes = [
        "rotated, and the model computes the same: the residual stream by a Hadamard matrix of "
        f"{config.hidden_size}, the values of heads by one of {head}. The weights of norms are in the "
        "linears after them."
    ]
    tensors = dict(checkpoint.tensors)
    if structure.tied and "lm_head.weight" not in tensors:
        embedding = tensors[structure.embedding]
        tensors["lm_head.weight"] = replace(embedding, name="lm_head.weight")
        notes.append(
            f"lm_head and the embedding are stored apart, {embedding.nbytes / 1e6:.2f} MB more where lm_head "
            "stays dense: rotated, only lm_head has the weights of the last norm. --lm-head packs it."
        )
    places = _places(checkpoint, structure, structure.embedding, tensors)
    for name, place in places.items():
        tensors[name] = replace(tensors[name], whole=place.rows is not None)
    changes = {
        "config": {**checkpoint.config, "tie_word_embeddings": False},
        "tensors": tensors,
        "notes": (*checkpoint.notes, *notes),
    }
    return RotatedCheckpoint(
        **{**vars(checkpoint), **changes},
        spaces=spaces,
        places=places,
        value_rows=config.num_key_value_heads * head,
    )


def _places(
    checkpoint: Checkpoint, structure: Structure, embedding: str, tensors: Mapping[str, StoredTensor]
) -> dict[str, Place]:
    """Return the rotations of those `tensors` that change, with the stored names of their norms.

    `embedding` is the stored name of the token embedding.
    """
    # Files of the bare decoder lack the prefix "model.".
    prefix = embedding.removesuffix("embed_tokens.weight")
    found = {}
    for name, tensor in tensors.items():
        if structure.dense.get(name, "").startswith(NOT_A_PARAMETER):
            continue
        inside = name.removeprefix(prefix)
        short = _LAYER.sub("", inside)
        place = next((place for place in PLACES if re.fullmatch(place.names, short)), None)
        if place is None:
            raise _refusal(checkpoint, f"the place of tensor {name!r} in the residual stream is unknown")
        if tensor.dtype not in QUANTIZABLE_DTYPES:
            raise _refusal(
                checkpoint,
                f"tensor {name!r} is {tensor.dtype}; expected {', '.join(sorted(QUANTIZABLE_DTYPES))}",
            )
        if place.columns or place.rows or place.is_norm:
            found[name] = replace(
                place,
                norm=None if place.norm is None else f"{prefix}{inside.removesuffix(short)}{place.norm}",
            )
    return found


def _rotation(checkpoint: Checkpoint, size: int, what: str) -> Rotation:
    found = Rotation.of(size)
    if found is None:
        raise _refusal(checkpoint, f"{what} is {size}, for which it has no Hadamard matrix")
    return found


def _refusal(checkpoint: Checkpoint, why: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.directory}: quantkit cannot rotate this model: {why}. Leave out --rotate, or `rotate` "
        "of the recipe."
    )

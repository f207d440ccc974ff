"""Classify tensors by names and shapes alone, for classes that transformers does not have.

A matrix is a linear unless a row of `SIGNS` applies. No model is built and no code of the checkpoint runs.
Some signs are only likely; a rule can pack such a tensor anyway.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.model.split_experts import CutTensor, StackedMatrix, cuts_alike, with_cuts
from quantkit.model.structure import (
    EMBEDDING,
    NOT_A_PARAMETER,
    ONE_OUTPUT,
    OTHER_EXPERTS,
    QUANTIZABLE_DTYPES,
    Kind,
    Linear,
    Structure,
)

#: Note for the plan on what tensors alone do not tell.
UNKNOWN = (
    "--model-free: names and shapes decided what is a linear. They do not tell whether a matrix is stored as "
    "[out, in], as nn.Linear has it, whether model code reads a weight itself, or what else has its weights; "
    "--rule 'NAME=keep' leaves a linear dense"
)

HEAD: Kind = "lm_head"

_EXPERT = re.compile(r"(.*\bexperts)\.\d+\.(.+)")
_BLOCK = re.compile(r"\blayers\.(\d+)\.")
#: Number of a block inside a name.
_NUMBER = re.compile(r"(?<![^.])\d+\.")
_LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")

_EMBEDDINGS = frozenset({"embed", "embeds", "embedding", "embeddings", "emb", "wte", "wpe", "position"})
_ROUTERS = frozenset({"router", "gate", "gating"})
#: Matrices whose weight model code reads: step sizes of Mamba, head weights of DeepSeek's indexer.
_READ = frozenset({"dt_proj", "weights_proj"})
_FURTHER_TOKENS = frozenset({"mtp", "nextn"})
#: Words in names of parts for images and sounds, and of their projectors.
_SENSES = frozenset(
    {
        *("visual", "vision", "vit", "sam", "image", "audio", "speech", "video"),
        *("projector", "merger", "connector", "resampler", "qformer"),
    }
)
_TEXT = "language_model"


@dataclass(frozen=True)
class Surroundings:
    """Facts about the whole checkpoint that classify its tensors.

    layers        number of blocks in config.json, None if it has none
    experts       number of experts by the name of their module
    group         weights per scale in a row, None for a whole row
    parts         all components of names
    only_senses   True if all blocks have names of parts for images and sounds
    """

    layers: int | None
    experts: Mapping[str, int]
    group: int | None
    parts: frozenset[str]
    only_senses: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, group: int | None) -> "Surroundings":
        names = [name.removesuffix(".weight").lower() for name in checkpoint.tensors]
        blocks = [one for one in names if _NUMBER.search(one)]
        return cls(
            _layers(checkpoint.config),
            _experts(checkpoint.tensors),
            group,
            frozenset(part for name in names for part in name.split(".")),
            all(not _SENSES.isdisjoint(re.split(r"[._]", name)) for name in blocks),
        )


@dataclass(frozen=True)
class Seen:
    """Tensor to classify, with properties of its checkpoint."""

    tensor: StoredTensor
    around: Surroundings

    @property
    def module(self) -> str:
        """Return the name without `.weight`."""
        return self.tensor.name.removesuffix(".weight")

    @property
    def leaf(self) -> str:
        """Return the last component of the name."""
        return self.tensor.name.rpartition(".")[2]

    @property
    def parts(self) -> list[str]:
        """Return the components of the module's name: `layers.0.q_proj` has three."""
        return self.module.lower().split(".")

    @property
    def words(self) -> frozenset[str]:
        """Return the words of the name: `q_proj` has two."""
        return frozenset(word for part in self.parts for word in part.split("_"))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def is_gate(self) -> bool:
        """Return True for a tensor in a router, or with a router's name and fewer rows than columns."""
        inside = "router" in self.words or not _ROUTERS.isdisjoint(self.parts[:-1])
        return inside or (self.parts[-1] in _ROUTERS and self.shape[0] < self.shape[1])

    @property
    def has_row_per_expert(self) -> bool:
        return self.shape[0] == self.around.experts.get(self.module.rpartition(".")[0])

    @property
    def is_beyond(self) -> bool:
        """Return True if the block number is not below the number of layers in config.json."""
        block = _BLOCK.search(self.module)
        layers = self.around.layers
        return block is not None and layers is not None and int(block[1]) >= layers

    @property
    def is_ragged(self) -> bool:
        """Return True if a row is longer than a group, but no multiple of the group size."""
        group = self.around.group
        return group is not None and self.shape[1] > group and self.shape[1] % group != 0

    @property
    def is_beside_text(self) -> bool:
        """Return True if it belongs to images or sounds, or is outside the module called language_model."""
        senses = not self.around.only_senses and not _SENSES.isdisjoint(self.words)
        beside = _TEXT in self.around.parts and _TEXT not in self.parts and self.parts[-1] != HEAD
        return senses or beside


@dataclass(frozen=True)
class Sign:
    """Row of `SIGNS`: a reason to stay dense, and its condition; `likely` if a rule may pack it anyway.

    `is_place` if the reason is only the part of the model that the tensor is in.
    """

    reason: str
    holds: Callable[[Seen], bool]
    likely: bool = False
    is_place: bool = False


#: Reasons to stay dense; the first that holds counts.
SIGNS: tuple[Sign, ...] = (
    Sign("its dtype is none that is quantized", lambda it: it.tensor.dtype not in QUANTIZABLE_DTYPES),
    Sign("a bias", lambda it: it.leaf == "bias"),
    Sign("a vector, such as the weight of a norm", lambda it: len(it.shape) < 2),
    Sign(
        "experts in one tensor, whose layout the tensors do not tell",
        lambda it: len(it.shape) > 2 and "experts" in it.words,
    ),
    Sign("more than two dimensions, as convolutions have", lambda it: len(it.shape) > 2),
    Sign("its name does not end in .weight, as that of a linear does", lambda it: it.leaf != "weight"),
    Sign(EMBEDDING, lambda it: not _EMBEDDINGS.isdisjoint(it.words)),
    Sign("a norm, by its name", lambda it: "norm" in it.parts[-1]),
    Sign("a table of biases, by its name", lambda it: "bias" in it.words),
    Sign("a convolution, by its name", lambda it: it.parts[-1].split("_")[-1].startswith("conv")),
    Sign(ONE_OUTPUT, lambda it: it.shape[0] == 1),
    Sign("a router, by its name", lambda it: it.is_gate, likely=True),
    Sign("a router: it has a row for each expert beside it", lambda it: it.has_row_per_expert, likely=True),
    Sign("model code reads its weight itself, by its name", lambda it: it.parts[-1] in _READ, likely=True),
    Sign(
        "of a head of further tokens, by its name",
        lambda it: not _FURTHER_TOKENS.isdisjoint(it.words),
        likely=True,
        is_place=True,
    ),
    Sign(
        "of a block beyond those that config.json counts",
        lambda it: it.is_beyond,
        likely=True,
        is_place=True,
    ),
    Sign(
        "of a part beside that for text, by its name",
        lambda it: it.is_beside_text,
        likely=True,
        is_place=True,
    ),
    Sign("the head, by its name", lambda it: it.parts[-1] == HEAD, likely=True),
    Sign(
        "outside the repeated blocks: its name has no number of one",
        lambda it: _NUMBER.search(it.module) is None,
        likely=True,
        is_place=True,
    ),
    Sign("its rows are not whole groups", lambda it: it.is_ragged, likely=True),
)


def read_tensors(checkpoint: Checkpoint, group: int | None) -> tuple[Checkpoint, Structure]:
    """Classify tensors by `SIGNS`; return `checkpoint` with a note on unknown tensors, and its structure.

    `group` is the number of weights per scale in a row by default, or None. The matrices of numbered experts
    are one linear per name, as in `read_structure`.
    """
    around = Surroundings.of(checkpoint, group)
    dense: dict[str, str] = {}
    gathered: dict[str, dict[str, Sign | None]] = {}
    for name, tensor in checkpoint.tensors.items():
        seen = Seen(tensor, around)
        sign = next((sign for sign in SIGNS if sign.holds(seen)), None)
        if sign is None or sign.likely:
            expert = _EXPERT.fullmatch(seen.module)
            gathered.setdefault(f"{expert[1]}.{expert[2]}" if expert else seen.module, {})[seen.module] = sign
        else:
            dense[name] = sign.reason
    linears: dict[str, Linear] = {}
    kept: dict[str, str] = {}
    for module, signs in gathered.items():
        shapes = {checkpoint.tensors[f"{one}.weight"].shape for one in signs}
        alike = len(shapes) == 1 and len(set(signs.values())) == 1
        for name, stored in (
            {module: tuple(signs)}.items() if alike else {one: (one,) for one in signs}.items()
        ):
            rows, columns = checkpoint.tensors[f"{stored[0]}.weight"].shape
            linears[name] = Linear(name, _kind(stored[0]), stored, (rows, columns))
            if (sign := signs[stored[0]]) is not None and linears[name].kind != "lm_head":
                kept[name] = sign.reason
    others = [
        name.removesuffix(".weight")
        for name, reason in dense.items()
        if reason != EMBEDDING and len(checkpoint.tensors[name].shape) > 1
    ]
    # A tied head has no tensor: readers would take it as packed unless listed here.
    others += [HEAD] if HEAD not in gathered else []
    structure = Structure(
        linears, dense, None, False, unpackable={name: (name,) for name in others}, kept=kept
    )
    return replace(checkpoint, notes=(*checkpoint.notes, UNKNOWN)), structure


def with_other_parts(checkpoint: Checkpoint, structure: Structure) -> tuple[Checkpoint, Structure]:
    """Return `checkpoint` and `structure` with linears of parts that the class lacks, such as extra heads.

    Linears are found by names and shapes, fused experts by the shapes of the class. All stay dense unless a
    rule packs them.
    """
    strangers = [name for name, reason in structure.dense.items() if reason == NOT_A_PARAMETER]
    cuts = cuts_alike(_stacked(structure), (checkpoint.tensors[name] for name in strangers))
    experts: dict[str, list[CutTensor]] = {}
    for cut in cuts.values():
        experts.setdefault(cut.source.name.removesuffix(".weight"), []).append(cut)
    around = Surroundings.of(checkpoint, None)
    found: dict[str, Linear] = {}
    for name in strangers:
        seen = Seen(checkpoint.tensors[name], around)
        signs = (sign for sign in SIGNS if not sign.is_place)
        if "head" in seen.words or any(sign.holds(seen) for sign in signs):
            continue
        rows, columns = seen.shape
        found[seen.module] = Linear(seen.module, "linear", (seen.module,), (rows, columns))
    for module, parts in experts.items():
        stored = tuple(cut.name.removesuffix(".weight") for cut in parts)
        rows, columns = parts[0].shape
        found[module] = Linear(module, "experts", stored, (rows, columns))
    other_experts = {
        name: OTHER_EXPERTS
        for name in strangers
        if len(checkpoint.tensors[name].shape) == 3 and "experts" in name.split(".")
    }
    structure = replace(
        structure,
        linears={**structure.linears, **found},
        kept={**structure.kept, **dict.fromkeys(found, NOT_A_PARAMETER)},
        dense={
            k: other_experts.get(k, v)
            for k, v in structure.dense.items()
            if k.removesuffix(".weight") not in found
        },
        unpackable={k: v for k, v in structure.unpackable.items() if k not in found},
        cuts={**structure.cuts, **cuts},
    )
    return (with_cuts(checkpoint, cuts) if cuts else checkpoint), structure


def _stacked(structure: Structure) -> Iterable[list[StackedMatrix]]:
    """Return a list of matrices for each set of experts in `structure`, with their places in stacked tensors.

    A set is the experts of one module; their tensor [E, ...] has all of them.
    """
    sets: dict[str, list[StackedMatrix]] = {}
    for linear in structure.linears.values():
        owner, _, leaf = linear.module.rpartition(".")
        cuts = [structure.cuts.get(f"{one}.weight") for one in linear.stored]
        if linear.kind == "experts":
            sets.setdefault(owner, []).extend(
                StackedMatrix.of_fused(leaf, len(cuts), linear.shape)
                if None in cuts
                else [StackedMatrix.of_cut(cut) for cut in cuts if cut is not None]
            )
    return sets.values()


def _kind(module: str) -> Kind:
    if _EXPERT.fullmatch(module):
        return "experts"
    return "lm_head" if module.rpartition(".")[2] == HEAD else "linear"


def _layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of blocks of the text model in config.json; None if it has none."""
    text = config.get("text_config")
    for node in (text if isinstance(text, dict) else {}, config):
        for key in _LAYERS:
            if type(node.get(key)) is int:
                return int(node[key])
    return None


def _experts(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the number of experts by the name of the module that contains `experts`.

    Counts numbered experts, or the first dimension of a stacked tensor [E, ...]. `tensors` are by stored
    name.
    """
    counts: dict[str, int] = {}
    for name, tensor in tensors.items():
        owner, found, rest = name.rpartition(".experts.")
        first = rest.partition(".")[0]
        count = (
            int(first) + 1
            if first.isdecimal() and len(first) < 10
            else tensor.shape[0]
            if len(tensor.shape) > 2
            else 0
        )
        if found:
            counts[owner] = max(counts.get(owner, 0), count)
    return counts

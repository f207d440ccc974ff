"""Classify the tensors of a checkpoint: linears of the decoder, and the rest.

The model is built from its config on the meta device. Its modules tell the kind of each tensor, and the
loading rules of transformers tell which tensor belongs to which parameter. A new architecture whose
linears are `nn.Linear` needs no change.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.completeness import has_base_names, is_only_head, lacks, missing_parameters
from quantkit.model.conversions import RowsTensor, conversions, row_cuts
from quantkit.model.model_class import meta_model
from quantkit.model.names import Renamed, other_names, renamed
from quantkit.model.parts import Parts, embeddings, packed_parts
from quantkit.model.split_experts import CutTensor, cuts_of

if TYPE_CHECKING:
    from torch import nn

#: Stored name to parameter, and True if it is fused with other tensors there.
Names = Mapping[str, tuple[str, bool]]
Places = Mapping[str, Renamed]

#: Reason for routers: a wrong choice costs more than the bytes saved.
ROUTER = "a router: it chooses experts and is tiny"
#: Reason for linears with one output, such as weights of shared experts.
ONE_OUTPUT = "it has one output: packing it saves next to nothing"

EMBEDDING = "an embedding"
TIED = "its weights are the embedding's, and it cannot be packed apart from that"
NO_HEAD = "the class of the model has no head"
SHARED = "another module has the same weights"
READ = "the model reads its weight itself, which a packed linear does not have"
REARRANGED = "transformers splits or joins it when it loads, so its rows are not those of one linear"
DIVIDED = "transformers divides its list of experts among modules, and quantkit packs only whole lists"
#: Reasons for tensors that become parameters of other names.
MOVED = frozenset({REARRANGED, DIVIDED})

_LAYER_COUNT = re.compile(r"(num|n)_(\w+_)?layers?")

Kind = Literal["linear", "experts", "lm_head", "embedding"]


@dataclass(frozen=True)
class Linear:
    """Linear of the model, or one fused set of experts.

    module       name in the loaded model
    stored       names of its matrices in the file, for experts one per expert and half; empty for a tied head
                 on a packed embedding
    shape        [N, K] of each matrix
    transposed   True if the file has [K, N]
    """

    module: str
    kind: Kind
    stored: tuple[str, ...]
    shape: tuple[int, int]
    transposed: bool = False


@dataclass(frozen=True)
class Structure:
    """Linears by module name, and the reason to stay dense for all other tensors and modules.

    dense         reason by stored tensor
    embedding     stored name of the token embedding, from which a tied lm_head takes its weights
    unpackable    linears and fused experts that are always dense, by module name, with their stored names
                  without `.weight`; the output's config lists them for readers
    tied_head     (stored name, embedding's name in the model), if the file has a tied weight as lm_head only
    aliases       names of modules in AutoModelForCausalLM's class, if they differ
    table         token embedding as a matrix that can be packed, or why it cannot
    model_class   class of the files, "" if not looked up
    kept          linears besides the head that only a rule packs, with the reason
    cuts          matrices of experts stored in one tensor, by the new name of each, with `.weight`
    row_cuts      linears stored as rows of one tensor
    """

    linears: Mapping[str, Linear]
    dense: Mapping[str, str]
    embedding: str | None
    tied: bool
    unpackable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied_head: tuple[str, str] | None = None
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    table: Linear | str = "no token embedding is known"
    model_class: str = ""
    kept: Mapping[str, str] = field(default_factory=dict)
    cuts: Mapping[str, CutTensor] = field(default_factory=dict)
    row_cuts: Mapping[str, RowsTensor] = field(default_factory=dict)


def read_structure(checkpoint: Checkpoint) -> Structure:
    """Classify every tensor of `checkpoint`.

    Raises `CheckpointError` for an unknown architecture, a parameter without tensor, or a tensor of another
    shape than in the config.
    """
    check_layer_counts(checkpoint)
    model = stored_model(checkpoint)
    places = dict(renamed(model, checkpoint.tensors))
    missing = missing_parameters(model, {place.parameter for place in places.values()})
    structure = _classify_tensors(model, places, checkpoint)
    structure = replace(structure, row_cuts=_row_cuts(model, checkpoint))
    # Some parameters are made of tensors of other names.
    if missing and MOVED.isdisjoint(structure.dense.values()):
        raise lacks(model, missing, checkpoint)
    aliases, head = other_names(model, _names(places), checkpoint)
    # Readers that make a text model of a model without a head would take its head to be packed.
    heads = {} if head is None else {head: (head,)}
    return replace(structure, aliases=aliases, unpackable={**structure.unpackable, **heads})


def stored_model(checkpoint: Checkpoint, *, buffers: bool = False) -> Any:
    """Build the model of the class that the files are of; arguments as for `meta_model`.

    Files of an embedding model have no head, though config.json may name a class with one.
    """
    model: Any = meta_model(checkpoint.config, checkpoint.directory, buffers=buffers)
    loaded = {place.parameter for _, place in renamed(model, checkpoint.tensors)}
    is_base = is_only_head(model, missing_parameters(model, loaded))
    return model.base_model if is_base and has_base_names(model, checkpoint.tensors) else model


def check_layer_counts(checkpoint: Checkpoint) -> None:
    """Raise `CheckpointError` if the config has more layers than the files have tensors.

    Building such a model could take forever.
    """
    pending: list[Any] = [checkpoint.config]
    while pending:
        node = pending.pop()
        pending += [value for value in node.values() if isinstance(value, dict)]
        for key, value in node.items():
            counts = _LAYER_COUNT.fullmatch(key) and isinstance(value, int | float)
            if counts and value > len(checkpoint.tensors):
                raise CheckpointError(
                    f"{checkpoint.directory / 'config.json'}: {key!r} is {value}, but the files hold "
                    f"{len(checkpoint.tensors)} tensors. The config does not belong to these weights."
                )


def _row_cuts(model: "nn.Module", checkpoint: Checkpoint) -> dict[str, RowsTensor]:
    from quantkit.model.linears import is_linear, is_transposed

    parts = packed_parts(model)
    shapes = {
        f"{name}.weight": tuple(module.get_parameter("weight").shape)
        for name, module in model.named_modules()
        if name in parts and is_linear(module) and not is_transposed(module)
    }
    return row_cuts(conversions(model, checkpoint.tensors).values(), checkpoint.tensors, shapes)


def _names(places: Places) -> Names:
    return {stored: (place.parameter, place.is_fused) for stored, place in places.items()}


def _special_linears(model: "nn.Module") -> dict[str, str]:
    """Return the linears that stay dense because of their purpose, with the reason."""
    from quantkit.model.routers import choosing_linears
    from quantkit.model.weight_reads import linears_that_are_read

    return {
        **dict.fromkeys(choosing_linears(model), ROUTER),
        **dict.fromkeys(linears_that_are_read(model), READ),
    }


def _classify_tensors(model: "nn.Module", places: Places, checkpoint: Checkpoint) -> Structure:
    from quantkit.model.experts import spec_of
    from quantkit.model.linears import transposed_linears

    modules = dict(model.named_modules())
    head = _head_name(model, modules)
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    tied = f"{head}.weight" in {*ties, *ties.values()}
    shared = {name.rpartition(".")[0] for name in (*ties, *ties.values())} - {head}
    tied_otherwise = tied and set(ties) != {f"{head}.weight"}
    special = {**dict.fromkeys(shared, SHARED), **_special_linears(model)}
    why_head = special.get(head or "") or _why_dense_head(head, modules, tied_otherwise)
    transposed = {name for name, _ in transposed_linears(model)}
    parts = packed_parts(model)
    parameters = {name: tuple(p.shape) for name, p in model.state_dict(keep_vars=True).items()}

    gathered: dict[str, list[str]] = {}
    dense: dict[str, str] = {}
    names = _names(places)
    inside = {name: module for name, module in modules.items() if name in parts and name not in shared}
    cuts = cuts_of(inside, checkpoint.tensors, places)
    whole = {cut.source.name for cut in cuts.values()}
    for stored, (parameter, fused) in names.items():
        if stored in whole:
            dense[stored] = REARRANGED
            continue
        owner, _, leaf = parameter.rpartition(".")
        module = modules.get(owner)
        if parameter not in parameters and (module is None or not fused):
            dense[stored] = NOT_A_PARAMETER
        elif fused:
            place, shape = places[stored], checkpoint.tensors[stored].shape
            why = _why_dense_experts(module, leaf, parts, place, shape)
            reason = SHARED if owner in shared else why
            _sort_in(stored, parameter, reason, gathered, dense)
        elif leaf == "weight" and module is not None and _may_be_linear(module):
            why = special.get(owner) or _why_dense_linear(module)
            _sort_in(stored, owner, why_head if owner == head else why, gathered, dense)
        else:
            dense[stored] = _kind_of_dense(module, leaf)
        if stored in dense and not fused and parameter in parameters:
            _check_shape(stored, checkpoint.tensors[stored].as_stored.shape, parameters[parameter])

    linears = {
        name: _linear(
            *(name, tuple(stored), checkpoint, parameters, head),
            name in transposed if name in modules else spec_of(modules[name.rpartition(".")[0]]).transposed,
        )
        for name, stored in gathered.items()
    }
    embedding = _embedding_name(model, modules, names)
    if head is not None and tied and why_head is None and head not in linears and embedding is not None:
        rows, columns = checkpoint.tensors[embedding].shape
        linears[head] = Linear(head, "lm_head", (head,), (rows, columns))
    stored_head = next((name for name, (of, _) in names.items() if of == f"{head}.weight"), None)
    tied_head = None
    if tied and embedding is None and stored_head is not None:
        tied_head = stored_head, f"{_input_name(model, modules)}.weight"
    packs_head = head in linears if tied else None
    table = _table(model, modules, embedding, special, packs_head, stored_head, checkpoint)
    unpackable = {**_unpackable(modules, linears, names), **_strangers(dense, checkpoint)}
    return Structure(
        *(linears, dense, embedding, tied, unpackable, tied_head),
        table=table,
        model_class=type(model).__name__,
        cuts=cuts,
        kept={
            name: parts.outside
            for name, linear in linears.items()
            if linear.kind == "linear" and name not in parts
        },
    )


def _why_dense_head(head: str | None, modules: Mapping[str, "nn.Module"], tied_otherwise: bool) -> str | None:
    """Return why the head, module `head`, cannot be packed; None if it can, or without a head.

    `tied_otherwise` is True if its weight is tied, but not as the only parameter that takes its values from
    another: `tie_word_embeddings` cannot untie the head alone.
    """
    from quantkit.model.architectures import why_not_packable

    if head is None:
        return None
    if tied_otherwise:
        return TIED
    return why_not_packable(modules[head])


def _table(
    model: Any,
    modules: Mapping[str, "nn.Module"],
    embedding: str | None,
    special: Mapping[str, str],
    packs_head: bool | None,
    stored_head: str | None,
    checkpoint: Checkpoint,
) -> Linear | str:
    """Return the token embedding as a matrix, or why it cannot be packed.

    `embedding` is its stored name, None if unknown. `special` are modules that stay dense, with the reason.
    `packs_head` is None without a tied head, and else True if the head can be packed. `stored_head` is the
    stored name of a tied head that the files have besides.
    """
    from quantkit.model.linears import lookup_of

    name = _input_name(model, modules)
    if embedding is None or name is None:
        return Structure.table
    kind, reason = type(model).__name__, special.get(name)
    reasons = (
        # Of the head alone, which then has the same table.
        (reason is not None and not (packs_head and reason == SHARED), str(reason)),
        (lookup_of(modules[name]) is None, f"{type(modules[name]).__name__} does more than look rows up"),
        (not model.can_generate(), f"a {kind} generates no text, and takes its dtype from the embedding"),
        (packs_head is False, "the head has the same weights, and cannot be packed"),
        (packs_head and stored_head, f"config.json ties {stored_head} to it, and the files have both"),
    )
    for applies, why in reasons:
        if applies:
            return why
    rows, columns = checkpoint.tensors[embedding].shape
    return Linear(name, "embedding", (embedding.removesuffix(".weight"),), (rows, columns))


def _unpackable(
    modules: Mapping[str, "nn.Module"], linears: Mapping[str, Linear], names: Names
) -> dict[str, tuple[str, ...]]:
    from quantkit.model.experts import DOWN, GATE_UP, UP, is_fused_experts

    stored: dict[str, list[str]] = {}
    for name, (parameter, _) in names.items():
        stored.setdefault(parameter, []).append(name.removesuffix(".weight"))
    candidates = {}
    for name, module in modules.items():
        if _may_be_linear(module):
            candidates[name] = stored.get(f"{name}.weight", [name])
        elif is_fused_experts(module):
            for leaf in {GATE_UP, UP, DOWN} & set(module._parameters):
                candidates[f"{name}.{leaf}"] = stored.get(f"{name}.{leaf}", [])
    return {name: tuple(of) for name, of in candidates.items() if name not in linears}


def _may_be_linear(module: "nn.Module") -> bool:
    """Return True for linears, and for other subclasses of `nn.Linear`."""
    from torch import nn

    from quantkit.model.linears import is_linear

    return isinstance(module, nn.Linear) or is_linear(module)


def _strangers(dense: Mapping[str, str], checkpoint: Checkpoint) -> dict[str, tuple[str, ...]]:
    """Return matrices that only other engines run as linears, such as routers and extra prediction heads."""
    found = [name for name, reason in dense.items() if reason in (NOT_A_PARAMETER, ROUTER)]
    found = [one for one in found if one.endswith(".weight") and len(checkpoint.tensors[one].shape) == 2]
    return {name.removesuffix(".weight"): (name.removesuffix(".weight"),) for name in found}


def _sort_in(
    stored: str, module: str, reason: str | None, gathered: dict[str, list[str]], dense: dict[str, str]
) -> None:
    if reason is None and not stored.endswith(".weight"):
        reason = "stored as a whole set of experts or under an unusual name"
    if reason is None:
        gathered.setdefault(module, []).append(stored.removesuffix(".weight"))
    else:
        dense[stored] = reason


def _linear(
    name: str,
    stored: tuple[str, ...],
    checkpoint: Checkpoint,
    parameters: Mapping[str, tuple[int, ...]],
    head: str | None,
    transposed: bool,
) -> Linear:
    from quantkit.model.experts import MATRICES

    expected = parameters.get(f"{name}.weight")
    turned = transposed and expected is not None
    if expected is None:
        kind: Kind = "experts"
        # A fused parameter is [E, halves * N, K]; its stored matrices are [N, K] each.
        experts, *sizes = parameters[name]
        rows, columns = reversed(sizes) if transposed else sizes
        halves = len(MATRICES[name.rpartition(".")[2]])
        expected = (rows // halves, columns)
        if len(stored) != halves * experts:
            raise CheckpointError(
                f"{checkpoint.directory} has {len(stored)} matrices of {name!r}; config.json says "
                f"{halves * experts}. Download the checkpoint again, or check that config.json belongs to it."
            )
    else:
        kind = "lm_head" if name == head else "linear"
    for one in stored:
        _check_shape(f"{one}.weight", checkpoint.tensors[f"{one}.weight"].as_stored.shape, expected)
    rows, columns = expected[::-1] if turned else expected
    return Linear(name, kind, stored, (rows, columns), turned)


def _check_shape(stored: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise CheckpointError(
            f"tensor {stored!r} has the shape {shape}; config.json says {expected}. "
            "The config does not belong to these weights."
        )


def _why_dense_linear(module: "nn.Module") -> str | None:
    from quantkit.model.architectures import why_not_packable
    from quantkit.model.linears import is_linear, matrix_shape

    if is_linear(module) and matrix_shape(module)[0] == 1:
        return ONE_OUTPUT
    return why_not_packable(module)


def _why_dense_experts(
    module: "nn.Module | None", leaf: str, parts: Parts, place: Renamed, shape: tuple[int, ...]
) -> str | None:
    from quantkit.model.architectures import why_not_packable
    from quantkit.model.experts import MATRICES, is_fused_experts

    if not place.is_stacked and leaf in MATRICES and len(shape) == 2:
        return DIVIDED
    if not place.is_stacked or module is None or not is_fused_experts(module) or leaf not in MATRICES:
        return REARRANGED
    if place.parameter.rpartition(".")[0] not in parts:
        return parts.outside.replace("a linear", "experts")
    return why_not_packable(module)


def _kind_of_dense(module: "nn.Module | None", leaf: str) -> str:
    from torch import nn

    if module is None:
        return "a parameter of the model itself"
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    if "Norm" in kind:
        return "a norm"
    if "Router" in kind or "Gate" in kind:
        return ROUTER
    if leaf == "bias":
        return "a bias"
    shape = getattr(module._parameters.get(leaf), "shape", ())
    stacked = leaf == "weight" and len(shape) == 3 and not hasattr(module, "kernel_size")
    what = "has several matrices in one tensor, but not gate, up and down of experts"
    return f"{leaf!r} of a {kind}, which {what if stacked else 'is not a linear'}"


def _head_name(model: Any, modules: Mapping[str, "nn.Module"]) -> str | None:
    head = embeddings(model, "output")
    return None if head is None else next((name for name, module in modules.items() if module is head), None)


def _embedding_name(model: Any, modules: Mapping[str, "nn.Module"], names: Names) -> str | None:
    weight = f"{_input_name(model, modules)}.weight"
    return next((stored for stored, (parameter, _) in names.items() if parameter == weight), None)


def _input_name(model: Any, modules: Mapping[str, "nn.Module"]) -> str | None:
    embedding = embeddings(model, "input")
    return next((name for name, module in modules.items() if module is embedding), None)


NOT_A_PARAMETER = "not a parameter of the model"
#: Reason of experts in one tensor for all that are not stored as those that the class has.
OTHER_EXPERTS = f"{NOT_A_PARAMETER}, and no experts of the model are stored by these names and shapes"


#: Weight dtypes that can be quantized. Others (float8, integers) are already codes.
QUANTIZABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

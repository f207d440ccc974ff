"""Classify the tensors of a checkpoint: linears of the decoder, and the rest.

The model is built from its config on the meta device. Its modules tell the kind of each tensor, and the
loading rules of transformers tell which tensor goes where. A new architecture needs no change here if its
linears are `nn.Linear`.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.split_experts import CutTensor, cuts_of

if TYPE_CHECKING:
    from torch import nn

#: Reason of linears that choose experts: tiny, and a wrong choice costs more than the bytes saved.
ROUTER = "a router: it chooses experts and is tiny"
#: Reason of linears with one output, such as those that weigh shared experts.
ONE_OUTPUT = "it has one output: packing it saves next to nothing"

#: Last name component of linears whose weight the model reads directly: time steps of Mamba, indexers of
#: sparse attention, the router of LongCat. All are small.
READ_NAMES = frozenset({"dt_proj", "weights_proj", "classifier"})

READ = "the model reads its weight itself, which a packed linear does not have"
REARRANGED = "transformers splits or joins it when it loads, so its rows are not those of one linear"

_LAYER_COUNT = re.compile(r"(num|n)_(\w+_)?layers?")

#: Tag with which transformers writes floats that JSON cannot express.
_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {name: float(name) for name in ("NaN", "Infinity", "-Infinity")}

Kind = Literal["linear", "experts", "lm_head"]


@dataclass(frozen=True)
class Linear:
    """Linear of the model, or one fused set of experts.

    `module` is its name in the loaded model. `stored` are the names of its matrices in the file, for experts
    one per expert and half. `shape` is [N, K] of each matrix.
    """

    module: str
    kind: Kind
    stored: tuple[str, ...]
    shape: tuple[int, int]


@dataclass(frozen=True)
class Structure:
    """Linears by module name, and for all other tensors and modules the reason to stay dense.

    `dense` is keyed by stored tensor. `embedding` is the stored name of the token embedding, from which a
    tied lm_head takes its weights. `unpackable` are linears and fused experts that are always dense, by
    module name, with their stored names without `.weight`; readers of the output must be told about them.
    `tied_head` is set if the file has a tied weight as lm_head only: (its stored name, name of the embedding
    in the model). `cuts` are the matrices of experts that are stored in one tensor for all, by the name that
    each gets, with `.weight`.
    """

    linears: Mapping[str, Linear]
    dense: Mapping[str, str]
    embedding: str | None
    tied: bool
    unpackable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied_head: tuple[str, str] | None = None
    cuts: Mapping[str, CutTensor] = field(default_factory=dict)


def read_structure(checkpoint: Checkpoint) -> Structure:
    """Classify every tensor of `checkpoint`.

    Raises `CheckpointError` for an unknown architecture, a parameter without tensor, or a tensor of another
    shape than in the config.
    """
    check_layer_counts(checkpoint)
    model = meta_model(checkpoint.config, checkpoint.directory)
    return _classify_tensors(model, checkpoint)


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


def meta_model(config: Mapping[str, Any], directory: Path, *, buffers: bool = False) -> "nn.Module":
    """Build the model of a config without weights; raise `CheckpointError` if transformers cannot.

    With `buffers`, buffers are real, on the CPU: values that a model computes once, such as rope frequencies.
    """
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    parsed = model_config(config, directory)
    try:
        with init_empty_weights(include_buffers=False) if buffers else torch.device("meta"):
            return AutoModelForCausalLM.from_config(parsed)  # type: ignore[no-any-return]
    except Exception as error:
        raise _unknown_model(config, directory, error) from error


def model_config(config: Mapping[str, Any], directory: Path) -> Any:
    """Return transformers' config for a config.json, with defaults filled in.

    Raises `CheckpointError` for an unknown model type.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {k: _with_floats(v) for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    try:
        return CONFIG_MAPPING[fields.get("model_type")].from_dict(fields)
    except Exception as error:
        raise _unknown_model(config, directory, error) from error


def _with_floats(value: Any) -> Any:
    """Return `value` of a config.json with tags such as `{"__float__": "Infinity"}` replaced by floats."""
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    name = value.get(_FLOAT_TAG)
    if len(value) == 1 and isinstance(name, str) and name in _TAGGED_FLOATS:
        return _TAGGED_FLOATS[name]
    return {key: _with_floats(one) for key, one in value.items()}


def _unknown_model(config: Mapping[str, Any], directory: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{directory / 'config.json'}: transformers cannot build a causal language model of model_type "
        f"{config.get('model_type')!r} from it ({type(error).__name__}: {error}). Check the config, or "
        "install a transformers that knows the architecture."
    )


def _classify_tensors(model: "nn.Module", checkpoint: Checkpoint) -> Structure:
    from torch import nn

    from quantkit.model.experts import spec_of
    from quantkit.model.names import renamed
    from quantkit.model.routers import choosing_linears

    modules = dict(model.named_modules())
    head = _head_name(model, modules)
    head_read = head if head is not None and reads_weight(type(model).forward, head) else None
    decoder = _decoder_prefix(model, modules)
    choosing = choosing_linears(model)
    parameters = {name: tuple(p.shape) for name, p in model.state_dict(keep_vars=True).items()}

    gathered: dict[str, list[str]] = {}
    dense: dict[str, str] = {}
    places = dict(renamed(model, checkpoint.tensors))
    names = {stored: (place.parameter, place.is_fused) for stored, place in places.items()}
    cuts = cuts_of(
        {name: module for name, module in modules.items() if name.startswith(decoder)},
        checkpoint.tensors,
        places,
    )
    whole = {cut.source.name for cut in cuts.values()}
    for stored, (parameter, fused) in names.items():
        if stored in whole:
            dense[stored] = REARRANGED
            continue
        owner, _, leaf = parameter.rpartition(".")
        module = modules.get(owner)
        if parameter not in parameters and not fused:
            dense[stored] = NOT_A_PARAMETER
        elif fused:
            reason = _why_dense_experts(module, leaf, decoder, owner)
            _sort_in(stored, parameter, reason, gathered, dense)
        elif leaf == "weight" and isinstance(module, nn.Linear):
            read, routes = owner == head_read, owner in choosing
            reason = READ if read else ROUTER if routes else _why_dense_linear(module, owner, decoder, head)
            _sort_in(stored, owner, reason, gathered, dense)
        else:
            dense[stored] = _kind_of_dense(module, leaf)
        if stored in dense and not fused and parameter in parameters:
            _check_shape(stored, checkpoint.tensors[stored].shape, parameters[parameter])

    linears = {
        name: _linear(
            *(name, tuple(stored), checkpoint, parameters, head),
            name not in modules and spec_of(modules[name.rpartition(".")[0]]).transposed,
        )
        for name, stored in gathered.items()
    }
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    if REARRANGED not in dense.values():
        loaded = {parameter for parameter, _ in names.values()}
        _check_complete(model, loaded, f"{head}.weight" if tied else None, checkpoint)
    embedding = _embedding_name(model, modules, names)
    packable = head != head_read and type(modules.get(head or "")) is nn.Linear
    if tied and packable and head not in linears and embedding is not None:
        assert head is not None
        rows, columns = checkpoint.tensors[embedding].shape
        linears[head] = Linear(head, "lm_head", (head,), (rows, columns))
    stored_head = next((name for name, (of, _) in names.items() if of == f"{head}.weight"), None)
    tied_head = None
    if tied and embedding is None and stored_head is not None:
        tied_head = stored_head, f"{_input_name(model, modules)}.weight"
    unpackable = _unpackable(modules, linears, names)
    return Structure(linears, dense, embedding, tied, unpackable, tied_head, cuts)


def _unpackable(
    modules: Mapping[str, "nn.Module"], linears: Mapping[str, Linear], names: Mapping[str, tuple[str, bool]]
) -> dict[str, tuple[str, ...]]:
    from torch import nn

    from quantkit.model.experts import DOWN, GATE_UP, UP, is_fused_experts

    stored: dict[str, list[str]] = {}
    for name, (parameter, _) in names.items():
        stored.setdefault(parameter, []).append(name.removesuffix(".weight"))
    candidates = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            candidates[name] = stored.get(f"{name}.weight", [name])
        elif is_fused_experts(module):
            for leaf in {GATE_UP, UP, DOWN} & set(module._parameters):
                candidates[f"{name}.{leaf}"] = stored.get(f"{name}.{leaf}", [])
    return {name: tuple(of) for name, of in candidates.items() if name not in linears}


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
        _check_shape(f"{one}.weight", checkpoint.tensors[f"{one}.weight"].shape, expected)
    return Linear(name, kind, stored, (expected[0], expected[1]))


def _check_shape(stored: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if shape != expected:
        raise CheckpointError(
            f"tensor {stored!r} has the shape {shape}; config.json says {expected}. "
            "The config does not belong to these weights."
        )


def _check_complete(
    model: "nn.Module", loaded: set[str], tied_head: str | None, checkpoint: Checkpoint
) -> None:
    """Raise `CheckpointError` if a parameter has no tensor.

    transformers would fill it with random numbers.
    """
    optional = [
        re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    ]
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    # A file may hold either of two tied parameters.
    tied = {tied_head, *ties, *(source for target, source in ties.items() if target in loaded)}
    missing = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name not in loaded and name not in tied and not any(p.search(name) for p in optional)
    ]
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory} has no weights for {len(missing)} parameters of the model, such as "
            f"{missing[0]!r}. Download the checkpoint again, or check that config.json belongs to it."
        )


def _why_dense_linear(module: "nn.Linear", name: str, decoder: str, head: str | None) -> str | None:
    from quantkit.model.architectures import why_not_packable

    if name != head:
        if not name.startswith(decoder):
            return "a linear outside the decoder"
        if module.out_features == 1:
            return ONE_OUTPUT
        if name.rpartition(".")[2] in READ_NAMES:
            return READ
    return why_not_packable(module)


def _why_dense_experts(module: "nn.Module | None", leaf: str, decoder: str, owner: str) -> str | None:
    from quantkit.model.architectures import why_not_packable
    from quantkit.model.experts import MATRICES, is_fused_experts

    if module is None or not is_fused_experts(module) or leaf not in MATRICES:
        return REARRANGED
    if not owner.startswith(decoder):
        return "experts outside the decoder"
    return why_not_packable(module)


def _kind_of_dense(module: "nn.Module | None", leaf: str) -> str:
    from torch import nn

    if module is None:
        return "a parameter of the model itself"
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return "an embedding"
    if "Norm" in kind:
        return "a norm"
    if "Router" in kind or "Gate" in kind:
        return ROUTER
    if leaf == "bias":
        return "a bias"
    return f"{leaf!r} of a {kind}, which is not a linear"


def reads_weight(function: Any, name: str) -> bool:
    """Return True if the source of `function` reads the weight of module `name` directly.

    Mamba models do: their forward reads the dtype of lm_head, and their initialization the weight of a
    linear.
    """
    return f".{name.rpartition('.')[2]}.weight" in _source(function)


@lru_cache(256)
def _source(function: Any) -> str:
    """Return the source of a function, cached because Python scans the file each time; "" without source."""
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return ""


def _head_name(model: Any, modules: Mapping[str, "nn.Module"]) -> str | None:
    head = model.get_output_embeddings()
    return None if head is None else next((name for name, module in modules.items() if module is head), None)


def _decoder_prefix(model: Any, modules: Mapping[str, "nn.Module"]) -> str:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    name = next((name for name, module in modules.items() if module is decoder), "")
    return f"{name}." if name else ""


def _embedding_name(
    model: Any, modules: Mapping[str, "nn.Module"], names: Mapping[str, tuple[str, bool]]
) -> str | None:
    weight = f"{_input_name(model, modules)}.weight"
    return next((stored for stored, (parameter, _) in names.items() if parameter == weight), None)


def _input_name(model: Any, modules: Mapping[str, "nn.Module"]) -> str | None:
    embedding = model.get_input_embeddings()
    return next((name for name, module in modules.items() if module is embedding), None)


NOT_A_PARAMETER = "not a parameter of the model"


#: Weight dtypes that can be quantized. Others (float8, integers) are codes of some format already.
QUANTIZABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

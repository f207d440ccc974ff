"""What the tensors of a checkpoint are: which are linears of the decoder, and what the rest is.

The model is built from its config on the meta device, so its own modules say what each tensor is, and
transformers' own loading rules say which tensor goes where. A new architecture needs nothing here as
long as its linears are linears.
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

if TYPE_CHECKING:
    from torch import nn

#: Last name of a linear that chooses experts: tiny, and wrong choices cost more than its bytes.
ROUTER_NAMES = frozenset({"gate", "router", "shared_expert_gate", "wg"})

#: Last name of a linear whose weight the model reads itself, beside calling it or instead: time steps of
#: Mamba, the indexers of sparse attention, the router of LongCat. All are small.
READ_NAMES = frozenset({"dt_proj", "weights_proj", "classifier"})

READ = "the model reads its weight itself, which a packed linear does not have"
REARRANGED = "transformers splits or joins it when it loads, so its rows are not those of one linear"

_LAYER_COUNT = re.compile(r"(num|n)_(\w+_)?layers?")

#: How transformers writes floats that JSON has no word for.
_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {name: float(name) for name in ("NaN", "Infinity", "-Infinity")}

Kind = Literal["linear", "experts", "lm_head"]


@dataclass(frozen=True)
class Linear:
    """A linear of the model, or one fused set of experts.

    `module` is its name in the loaded model, `stored` the names of its matrices in the file (one per
    expert and half for experts), and `shape` the [N, K] of each of them.
    """

    module: str
    kind: Kind
    stored: tuple[str, ...]
    shape: tuple[int, int]


@dataclass(frozen=True)
class Structure:
    """Linears by module name, and every other tensor's or module's reason to stay dense.

    `dense` is keyed by stored tensor. `embedding` is the stored name of the token embedding, from which a
    tied lm_head takes its weights when the file has none of its own. `unpackable` are the linears and
    fused experts that stay dense whatever a recipe says, by module name, with their stored names without
    `.weight`: a reader of the output takes every linear for packed that it is not told is dense.
    `tied_head` is the stored name of a tied lm_head whose weights the file has under that name alone, and the
    name of the embedding in the model; else None.
    """

    linears: Mapping[str, Linear]
    dense: Mapping[str, str]
    embedding: str | None
    tied: bool
    unpackable: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tied_head: tuple[str, str] | None = None


def read_structure(checkpoint: Checkpoint) -> Structure:
    """Classify every tensor of `checkpoint`.

    Raises `CheckpointError` when transformers does not know the architecture, when a parameter of the model
    has no tensor, or when a tensor's shape is not the one the config gives it.
    """
    check_layer_counts(checkpoint)
    model = meta_model(checkpoint.config, checkpoint.directory)
    return _classify(model, checkpoint)


def check_layer_counts(checkpoint: Checkpoint) -> None:
    """Building a model of as many layers as a config asks for may never end: no layer is without a tensor."""
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
    """The model of a config, without weights; `CheckpointError` if transformers cannot build it.

    With `buffers` those are real, on the CPU: what a model computes once, such as rotary frequencies.
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
    """transformers' own config of a config.json, with all that it leaves out; `CheckpointError` if it has
    none.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields = {k: _with_floats(v) for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    try:
        return CONFIG_MAPPING[fields.get("model_type")].from_dict(fields)
    except Exception as error:
        raise _unknown_model(config, directory, error) from error


def _with_floats(value: Any) -> Any:
    """`value` of a config.json with the floats that transformers wrote as `{"__float__": "Infinity"}`."""
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


def _classify(model: "nn.Module", checkpoint: Checkpoint) -> Structure:
    from torch import nn

    from quantkit.model.names import model_names

    modules = dict(model.named_modules())
    head = _head_name(model, modules)
    read = head if head is not None and reads_weight(type(model).forward, head) else None
    decoder = _decoder_prefix(model, modules)
    parameters = {name: tuple(p.shape) for name, p in model.state_dict(keep_vars=True).items()}

    gathered: dict[str, list[str]] = {}
    dense: dict[str, str] = {}
    names = model_names(model, checkpoint.tensors)
    for stored, (parameter, fused) in names.items():
        owner, _, leaf = parameter.rpartition(".")
        module = modules.get(owner)
        if parameter not in parameters and not fused:
            dense[stored] = NOT_A_PARAMETER
        elif fused:
            reason = _why_dense_experts(module, leaf, decoder, owner)
            _file(stored, parameter, reason, gathered, dense)
        elif leaf == "weight" and isinstance(module, nn.Linear):
            reason = READ if owner == read else _why_dense_linear(module, owner, decoder, head)
            _file(stored, owner, reason, gathered, dense)
        else:
            dense[stored] = _what(module, leaf)
        if stored in dense and not fused and parameter in parameters:
            _check_shape(stored, checkpoint.tensors[stored].shape, parameters[parameter])

    linears = {
        name: _linear(name, tuple(stored), checkpoint, parameters, head) for name, stored in gathered.items()
    }
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    if REARRANGED not in dense.values():
        found = {parameter for parameter, _ in names.values()}
        _check_complete(model, found, f"{head}.weight" if tied else None, checkpoint)
    embedding = _embedding_name(model, modules, names)
    packable = head != read and type(modules.get(head or "")) is nn.Linear
    if tied and packable and head not in linears and embedding is not None:
        assert head is not None
        rows, columns = checkpoint.tensors[embedding].shape
        linears[head] = Linear(head, "lm_head", (head,), (rows, columns))
    stored_head = next((name for name, (of, _) in names.items() if of == f"{head}.weight"), None)
    tied_head = None
    if tied and embedding is None and stored_head is not None:
        tied_head = stored_head, f"{_input_name(model, modules)}.weight"
    return Structure(linears, dense, embedding, tied, _unpackable(modules, linears, names), tied_head)


def _unpackable(
    modules: Mapping[str, "nn.Module"], linears: Mapping[str, Linear], names: Mapping[str, tuple[str, bool]]
) -> dict[str, tuple[str, ...]]:
    from torch import nn

    from quantkit.model.architectures import DOWN, GATE_UP, is_fused_experts

    stored: dict[str, list[str]] = {}
    for name, (parameter, _) in names.items():
        stored.setdefault(parameter, []).append(name.removesuffix(".weight"))
    found = {}
    for name, module in modules.items():
        if isinstance(module, nn.Linear):
            found[name] = stored.get(f"{name}.weight", [name])
        elif is_fused_experts(module):
            for leaf in (GATE_UP, DOWN):
                found[f"{name}.{leaf}"] = stored.get(f"{name}.{leaf}", [])
    return {name: tuple(of) for name, of in found.items() if name not in linears}


def _file(
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
) -> Linear:
    from quantkit.model.architectures import GATE_UP

    expected = parameters.get(f"{name}.weight")
    if expected is None:
        kind: Kind = "experts"
        # A fused parameter is [E, N of all halves, K]; its stored matrices are [N, K] each.
        experts, rows, columns = parameters[name]
        halves = 2 if name.endswith(f".{GATE_UP}") else 1
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
    model: "nn.Module", found: set[str], tied_head: str | None, checkpoint: Checkpoint
) -> None:
    """transformers fills what is missing with random numbers, so nothing may be."""
    optional = [
        re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    ]
    ties: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    # Of two tied parameters a file may hold either.
    tied = {tied_head, *ties, *(source for target, source in ties.items() if target in found)}
    missing = [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name not in found and name not in tied and not any(p.search(name) for p in optional)
    ]
    if missing:
        raise CheckpointError(
            f"{checkpoint.directory} has no weights for {len(missing)} parameters of the model, such as "
            f"{missing[0]!r}. Download the checkpoint again, or check that config.json belongs to it."
        )


def _why_dense_linear(module: "nn.Module", name: str, decoder: str, head: str | None) -> str | None:
    from quantkit.model.architectures import why_not_packable

    if name != head:
        if not name.startswith(decoder):
            return "a linear outside the decoder"
        if name.rpartition(".")[2] in ROUTER_NAMES:
            return "a router: it chooses experts and is tiny"
        if name.rpartition(".")[2] in READ_NAMES:
            return READ
    return why_not_packable(module)


def _why_dense_experts(module: "nn.Module | None", leaf: str, decoder: str, owner: str) -> str | None:
    from quantkit.model.architectures import DOWN, GATE_UP, is_fused_experts, why_not_packable

    if module is None or not is_fused_experts(module) or leaf not in (GATE_UP, DOWN):
        return REARRANGED
    if not owner.startswith(decoder):
        return "experts outside the decoder"
    return why_not_packable(module)


def _what(module: "nn.Module | None", leaf: str) -> str:
    from torch import nn

    if module is None:
        return "a parameter of the model itself"
    kind = type(module).__name__
    if isinstance(module, nn.Embedding):
        return "an embedding"
    if "Norm" in kind:
        return "a norm"
    if "Router" in kind or "Gate" in kind:
        return "a router: it chooses experts and is tiny"
    if leaf == "bias":
        return "a bias"
    return f"{leaf!r} of a {kind}, which is not a linear"


def reads_weight(function: Any, name: str) -> bool:
    """Whether a function of a model reads the weight of a module of that name itself, as its source says.

    The forward of Mambas asks for the dtype of their head's, and what initializes them for that of a linear.
    """
    return f".{name.rpartition('.')[2]}.weight" in _source(function)


@lru_cache(256)
def _source(function: Any) -> str:
    """The source of a function, which Python reads to its end each time; nothing where there is none."""
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


#: Weight dtypes that can be quantized. Others (float8 and integers) are some format's codes already.
QUANTIZABLE_DTYPES = frozenset({"F64", "F32", "F16", "BF16"})

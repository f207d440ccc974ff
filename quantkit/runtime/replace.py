"""Replace dense modules by packed ones, and back."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.errors import CheckpointError, FormatError, UsageError, first_of
from quantkit.model.experts import (
    DOWN,
    GATE_UP,
    MATRICES,
    UP,
    ExpertsSpec,
    find_spec,
    is_fused_experts,
)
from quantkit.model.linears import is_linear, is_transposed, lookup_of, matrix_shape
from quantkit.packing.names import KV_PARTS, Container
from quantkit.packing.schemes import Scheme
from quantkit.runtime.packed_embedding import PackedEmbedding, tie_dense, tie_to_table, tied_to
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.packed_module import PackedModule


def packed_modules(model: nn.Module) -> Iterator[tuple[str, PackedModule]]:
    """Yield the packed modules of `model` with their names."""
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            yield name, module


def packed_replacement(
    name: str, module: nn.Module, scheme_of: Callable[[str], Scheme | None], container: Container
) -> PackedModule | None:
    """Create the uninitialized packed replacement of `module`, a linear or fused experts called `name`.

    `scheme_of` maps the name of a linear, or of a parameter of fused experts, to its scheme, or to None if it
    stays dense. `container` determines the names in the state dict. Returns None if `module` stays dense.
    Raises `FormatError` for K = 0, for experts that compute an unknown formula, and for experts of which only
    one parameter has a scheme.
    """
    if is_linear(module):
        scheme = scheme_of(name)
        if scheme is None:
            return None
        rows, columns = matrix_shape(module)
        _refuse_empty(name, columns)
        scheme.check_features(name, columns)
        bias = module._parameters.get("bias")
        return PackedLinear(
            columns,
            rows,
            scheme.for_columns(columns),
            container,
            bias_dtype=None if bias is None else bias.dtype,
        )
    if not is_fused_experts(module):
        return None
    leaf = GATE_UP if module._parameters.get(GATE_UP) is not None else UP
    first, down = scheme_of(f"{name}.{leaf}"), scheme_of(f"{name}.{DOWN}")
    if first is None and down is None:
        return None
    spec = find_spec(module)
    reason = spec if isinstance(spec, str) else f"{leaf} and {DOWN} are packed together or not at all"
    if not isinstance(spec, ExpertsSpec) or first is None or down is None:
        raise FormatError(f"experts {name!r} cannot be packed: {reason}. Quantize the model again.")
    experts: Any = module
    _refuse_empty(name, *experts.down_proj.shape[1:])
    _, hidden, intermediate = spec.sizes(experts.down_proj.shape)
    first.check_features(f"{name}.{leaf}", hidden)
    down.check_features(f"{name}.{DOWN}", intermediate)
    return PackedExperts.replacing(experts, first, down, container)


def packed_table(
    name: str, module: nn.Embedding, scheme: Scheme | None, container: Container
) -> PackedEmbedding | None:
    """Create the uninitialized packed replacement of the embedding `module`, called `name`.

    `container` determines the names in its state dict. Returns None if `scheme` is None. Raises `FormatError`
    for K = 0, and for an embedding that does more than look rows up and multiply them by a factor.
    """
    if scheme is None:
        return None
    lookup, (rows, columns) = lookup_of(module), module.weight.shape
    if lookup is None:
        raise FormatError(
            f"embedding {name!r} cannot be packed: {type(module).__name__} does more than look rows up. "
            "Quantize the model again."
        )
    _refuse_empty(name, columns)
    return PackedEmbedding(columns, rows, scheme.for_columns(columns), container, lookup, module.weight.dtype)


def schemes_in(
    model: nn.Module, config: QuantizationConfig, names: Mapping[str, str] | None = None
) -> dict[str, Scheme | None]:
    """Return the scheme of each linear, parameter of fused experts and embedding, by name; None if dense.

    Dense embeddings are left out unless `config` packs them. If the scheme in `config` equals the module's
    scheme for its K columns, the one in `config` is returned, else the module's. `names` maps modules of
    `model` to names in `config`, if they differ because `model` is of another class than the checkpoint.
    """
    found: dict[str, Scheme | None] = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedModule):
            for parameter, (scheme, (_, columns), _) in module.logical().items():
                full = name if parameter == "weight" else f"{name}.{parameter}"
                own = config.scheme_of(full if names is None else names.get(full, ""))
                same = own is not None and own.for_columns(columns) == scheme
                found[full] = own if same else scheme
        elif is_linear(module) or (isinstance(module, nn.Embedding) and config.modules.get(name) is not None):
            found[name] = None
        elif is_fused_experts(module):
            found.update({f"{name}.{leaf}": None for leaf in MATRICES if leaf in module._parameters})
    return found


def _refuse_empty(name: str, *columns: int) -> None:
    if min(columns) < 1:
        raise FormatError(
            f"{name!r} has {min(columns)} input features by config.json; packed weights have at least one. "
            "Restore config.json, or quantize the model again."
        )


def swap_modules(
    model: nn.Module, config: QuantizationConfig, names: Mapping[str, str] | None = None
) -> None:
    """Replace the modules of `model` that `config` packs by packed modules on the meta device, in place.

    `names` maps modules to their names in `config` if `model` is of another class than the checkpoint.
    Modules without a name, such as a new head, stay dense. A head tied to a packed embedding gets the
    embedding's parameters. Raises `CheckpointError` if `config` packs modules that the model lacks or cannot
    pack, or a linear whose weight is tied to a dense embedding.
    """
    matched = set()

    def scheme_of(name: str) -> Any:
        matched.add(name)
        # A tied head has no tensor in the file, so `names` cannot have it.
        if name in heads:
            return config.modules[tables[heads[name]]]
        known = name if names is None else names.get(name)
        return None if known is None else config.scheme_of(known)

    modules = list(model.named_modules())
    # Only listed modules, because the default scheme is for linears.
    tables = {
        name: known
        for name, module in modules
        if isinstance(module, nn.Embedding)
        and (known := name if names is None else names.get(name)) is not None
        and config.modules.get(known) is not None
    }
    heads = {head: table for table in tables for head in tied_to(model, table)}
    for name, module in modules:
        try:
            with torch.device("meta"):
                if isinstance(module, nn.Embedding):
                    packed: PackedModule | None = packed_table(
                        name, module, scheme_of(name) if name in tables else None, config.container
                    )
                else:
                    packed = packed_replacement(name, module, scheme_of, config.container)
        except FormatError as error:
            raise CheckpointError(str(error)) from error
        if packed is not None:
            if name not in heads.keys() | tables.keys():
                _refuse_tied(model, name)
            packed.train(module.training)
            model.set_submodule(name, packed)
    for head, table in heads.items():
        tie_to_table(model, head, table)
    if config.kv_scales:
        _add_kv_scales(model)
    unknown = sorted(
        name
        for name, scheme in config.modules.items()
        if scheme and name not in matched and not is_elsewhere(model, name)
    )
    # A model of another class may be only a part of the checkpoint.
    if unknown and names is None:
        raise CheckpointError(
            f"quantization_config packs {first_of(map(repr, unknown))}, which {type(model).__name__} "
            "does not have. Quantize the model again, or use the transformers version it was made with."
        )


def _add_kv_scales(model: nn.Module) -> None:
    """Register buffers for KV scales, float32 [1] on meta, in attention with packed k_proj and v_proj.

    No product uses the scales; a KV cache in fp8 does, and `save_pretrained` writes them.
    """
    for attention in list(model.modules()):
        leaves = {leaf for leaf in KV_PARTS if isinstance(attention._modules.get(leaf), PackedLinear)}
        if leaves == set(KV_PARTS):
            for part in KV_PARTS.values():
                attention.register_buffer(part, torch.empty(1, dtype=torch.float32, device="meta"))


def _drop_kv_scales(model: nn.Module, packed: Iterable[str]) -> None:
    """Undo `_add_kv_scales` in the parents of the modules named in `packed`."""
    for parent in {name.rpartition(".")[0] for name in packed}:
        for part in KV_PARTS.values():
            model.get_submodule(parent)._buffers.pop(part, None)


def is_elsewhere(model: nn.Module, name: str) -> bool:
    """Return True if `model` lacks the parent of module `name`: that of an extra prediction head, say."""
    try:
        model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        return True
    return False


def unpack_modules(model: Any, dtype: torch.dtype) -> None:
    """Undo `swap_modules` in place: dequantize packed modules to dense ones, and cast `model` to `dtype`.

    Raises `UsageError`, before any change, for a model that is offloaded, on several devices, or with
    adapters.
    """
    packed = dict(packed_modules(model))
    for name, module in packed.items():
        if module.tensor_parallel is not None or hasattr(module, "_hf_hook"):
            raise UsageError(
                f"{name!r} cannot be dequantized: the model is divided among devices or offloaded. Load it "
                "on one device, such as with quantkit.load(path, device='cpu')."
            )
    before = model.dtype
    with torch.device("meta"):
        skeleton = dict(type(model)(model.config).named_modules())
    wrapped = [name for name in packed if name not in skeleton]
    if wrapped:
        raise UsageError(
            f"{wrapped[0]!r} cannot be dequantized: it is no module of {type(model).__name__}, but of an "
            "adapter perhaps. Take adapters out first, or dequantize before they are added."
        )
    with torch.no_grad():
        for name, module in packed.items():
            dense = skeleton[name]
            weights = module.dense_weights(dtype)
            if is_transposed(dense):
                weights = {name: weight.T.contiguous() for name, weight in weights.items()}
            for parameter, weight in {**module._parameters, **weights}.items():
                if parameter in dense._parameters:
                    dense._parameters[parameter] = None if weight is None else nn.Parameter(weight)
            if isinstance(module, PackedEmbedding):
                module.restore_buffers(dense)
            model.set_submodule(name, dense.train(module.training))
        if any(isinstance(module, PackedEmbedding) for module in packed.values()):
            tie_dense(model)
        _drop_kv_scales(model, packed)
        # Buffers, such as rope frequencies, and parameters kept in float32 keep their dtype.
        for parameter in model.parameters():
            if parameter.dtype == before:
                parameter.data = parameter.data.to(dtype)


def _refuse_tied(model: nn.Module, name: str) -> None:
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    weight = f"{name}.weight"
    if weight in tied or weight in tied.values():
        raise CheckpointError(
            f"{name!r} is packed, but config.json ties its weight to the embedding. Set "
            '"tie_word_embeddings": false in config.json, or quantize the model again.'
        )

"""Plan a packed checkpoint from headers alone: every tensor, its file and its size.

A plan decides everything before a weight is read. So sizes, refusals and the fate of every layer are known
first, and the writer can write chunks in any order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.compressed_tensors import (
    compressed_tensors_format,
    stored_format,
    why_not_compressed_tensors,
)
from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES
from quantkit.checkpoint.model_record import LayerRecord, Measured
from quantkit.checkpoint.quantization_config import PACKED_TABLE, Assignment, QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.errors import CheckpointError
from quantkit.files import size_text
from quantkit.model.model_class import named_classes
from quantkit.model.structure import NO_HEAD, NOT_A_PARAMETER, QUANTIZABLE_DTYPES, TIED, Linear, Structure
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme
from quantkit.quantization.plan_checks import check_activations, check_experts, check_kv_scales
from quantkit.quantization.plan_warnings import dense_parts, fused_sets, plan_notes, readers_beside
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.table import HEAD_KEPT, asked_table, packed_table, with_table
from quantkit.quantization.task import Task, with_kv_scale
from quantkit.recipes.recipe import Fate, Recipe

if TYPE_CHECKING:
    from quantkit.quantization.allocate.allocation import Allocation

CUT = "transformers has one tensor for all experts of this model, and finds none of theirs without quantkit"


@dataclass(frozen=True)
class Shard:
    """Output file of a plan: its name, and the tasks that write its tensors, in order."""

    filename: str
    tasks: tuple[Task, ...]

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for task in self.tasks for spec in task.outputs)


@dataclass(frozen=True)
class LayerPlan:
    """Plan of one linear: fate and stored scheme, number of weights, bytes in the source and in the output.

    `weights` is 0 for a head that is tied to a packed embedding.
    """

    linear: Linear
    fate: Fate
    scheme: Scheme | None
    weights: int
    source_bytes: int
    output_bytes: int

    @property
    def bits_per_weight(self) -> float | None:
        """Return the stored bits per weight; None for a head that is tied to a packed embedding."""
        return 8 * self.output_bytes / self.weights if self.weights else None


@dataclass(frozen=True)
class Plan:
    """Everything about a packed checkpoint that headers determine, and the allocation behind its recipe.

    `shards` are the output files, `layers` the linears, and `model_config` is config.json. `dense` has the
    reason why a tensor is dense, by tensor; `not_portable` why the output needs quantkit, by layer. `readers`
    are tools known to read the container. `warnings` matter more than `notes`.
    """

    shards: tuple[Shard, ...]
    layers: tuple[LayerPlan, ...]
    dense: Mapping[str, str]
    config: QuantizationConfig
    assignments: tuple[Assignment, ...]
    not_portable: tuple[str, ...]
    model_config: dict[str, Any]
    source_bytes: int
    notes: tuple[str, ...]
    allocation: "Allocation | None" = None
    readers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def __repr__(self) -> str:
        packed = sum(layer.scheme is not None for layer in self.layers)
        bits = self.bits_per_weight["linears"]
        size = f"{size_text(self.source_bytes)} to {size_text(self.output_bytes)}"
        in_bits = "" if bits is None else f", {bits:.4g} bits per weight"
        return f"Plan({packed} of {len(self.layers)} linears packed{in_bits}, {size})"

    @property
    def output_bytes(self) -> int:
        """Return the bytes of all output tensors."""
        return sum(task.nbytes for shard in self.shards for task in shard.tasks)

    @property
    def weight_map(self) -> dict[str, str]:
        """Return the index: output tensor -> file."""
        return {spec.name: shard.filename for shard in self.shards for spec in shard.specs}

    @property
    def quantized_bytes(self) -> int:
        """Return the bytes of the packed linears, with all parts."""
        return sum(layer.output_bytes for layer in self.layers if layer.scheme is not None)

    @property
    def quantized_weights(self) -> int:
        """Return the number of logical weights of the packed linears."""
        return sum(layer.weights for layer in self.layers if layer.scheme is not None)

    @property
    def model_weights(self) -> int:
        """Return the number of weights of the model; a tied lm_head counts as part of the embedding."""
        sources = {task.source.location: task.source for shard in self.shards for task in shard.tasks}
        return sum(source.elements for source in sources.values())

    def layer_records(self, measured: Mapping[str, Measured]) -> dict[str, LayerRecord]:
        """Return the record of each linear by module, with its entry in `measured`, if any."""
        return {
            layer.linear.module: LayerRecord(
                kind=layer.linear.kind,
                shape=layer.linear.shape,
                matrices=len(layer.linear.stored),
                scheme=None if layer.scheme is None else str(layer.scheme),
                method=None if layer.fate.method is None else layer.fate.method.name,
                bits_per_weight=None if layer.scheme is None else layer.bits_per_weight,
                reason=layer.fate.reason,
                **({"relative_error": None} if one is None else vars(one)),
            )
            for layer in self.layers
            for one in (measured.get(layer.linear.module),)
        }

    @property
    def bits_per_weight(self) -> dict[str, float | None]:
        """Return all stored bits per logical weight of the `linears` (None without any) and the `model`."""
        linears = 8 * self.quantized_bytes / self.quantized_weights if self.quantized_weights else None
        return {"linears": linears, "model": 8 * self.output_bytes / self.model_weights}


def make_plan(
    checkpoint: Checkpoint,
    structure: Structure,
    recipe: Recipe,
    *,
    max_shard_bytes: int = QuantizeOptions.max_shard_bytes,
) -> Plan:
    """Plan the quantization of `checkpoint` by `recipe`. Reads no weights.

    Raises `UsageError` for a recipe that fits no layer, splits fused experts, or packs an embedding that
    cannot be packed. Raises `CheckpointError` for a linear whose dtype cannot be quantized.
    """
    sources = _sources(checkpoint, structure)
    fates = recipe.fates(
        {name: sources[linear.stored[0]].torch_dtype for name, linear in structure.linears.items()},
        {
            **{name: HEAD_KEPT for name, linear in structure.linears.items() if linear.kind == "lm_head"},
            **structure.kept,
        },
        {
            # Neither a tied head nor the head of another class has a tensor to give a reason for.
            **dict.fromkeys(
                structure.unpackable, NO_HEAD if structure.model_class and not structure.tied else TIED
            ),
            **{name.removesuffix(".weight"): reason for name, reason in structure.dense.items()},
        },
    )
    table = asked_table(checkpoint, structure, recipe, fates)
    kv_scales = recipe.kv_scales is not None
    return plan_of(checkpoint, structure, fates, table, max_shard_bytes=max_shard_bytes, kv_scales=kv_scales)


def plan_of(
    checkpoint: Checkpoint,
    structure: Structure,
    fates: Mapping[str, Fate],
    table: Fate | None = None,
    *,
    max_shard_bytes: int = QuantizeOptions.max_shard_bytes,
    kv_scales: bool = False,
) -> Plan:
    """Plan the output for the fates of linears, by module, and of the token embedding, `table`.

    With `kv_scales` each attention layer gets the scales of its keys and values. Reads no weights. Raises
    `UsageError` for fates that split fused experts, and for inputs that a linear cannot round so. Raises
    `CheckpointError` for a linear whose dtype cannot be quantized.
    """
    if table is not None:
        structure, fates = with_table(structure, fates, table)
    sources = _sources(checkpoint, structure)
    schemes = {
        name: None if fate.scheme is None else fate.scheme.for_columns(structure.linears[name].shape[1])
        for name, fate in fates.items()
    }
    check_experts(structure, schemes)
    check_activations(structure, fates)

    def names(module: str) -> tuple[str, ...]:
        return structure.aliases.get(module, ())

    assignments = tuple(
        Assignment(
            name,
            linear.stored,
            linear.shape,
            fates[name].scheme,
            head=linear.kind == "lm_head",
            own_names=_is_cut(structure, linear),
            transposed=linear.transposed,
            is_table=linear.kind == "embedding",
            aliases=names(name),
        )
        for name, linear in structure.linears.items()
    ) + tuple(
        Assignment(name, stored, (1, 1), None, aliases=names(name))
        for name, stored in structure.unpackable.items()
    )
    config = QuantizationConfig.from_assignments(assignments)
    config = replace(config, kv_scales=kv_scales)
    attention = check_kv_scales(schemes) if kv_scales else frozenset()
    untied = _untied_head(structure, schemes)

    tasks, copied = [], set[str]()
    layer_bytes: dict[str, int] = {}
    beside = _beside(structure, fates, schemes, sources, config.container)
    owners = {one: linear for linear in structure.linears.values() for one in linear.stored}
    for name, source in _in_file_order(checkpoint, sources):
        linear = owners.get(name)
        scheme = None if linear is None else schemes[linear.module]
        if linear is not None and scheme is not None:
            task = _packing_task(name, source, linear, scheme, fates[linear.module], config.container)
            task = replace(task, beside=beside.get(name, ()))
            task = with_kv_scale(task, name) if linear.module.rpartition(".")[0] in attention else task
        elif f"{name}.weight" in structure.cuts:
            # Dense experts keep their one fused tensor.
            whole = structure.cuts[f"{name}.weight"].source
            if whole.name in copied:
                continue
            copied.add(whole.name)
            task = Task(whole, (TensorSpec(whole.name, whole.dtype, whole.shape),))
        elif name + ".weight" in checkpoint.tensors or linear is None:
            task = Task(source, (TensorSpec(source.name, source.dtype, source.as_stored.shape),))
        else:
            continue  # A tied lm_head that stays tied has no tensor of its own.
        tasks.append(task)
        if linear is not None:
            layer_bytes[linear.module] = layer_bytes.get(linear.module, 0) + task.nbytes

    portable = config.container == "compressed-tensors"
    notes = plan_notes(checkpoint.config, structure, schemes, assignments, config.container, untied)
    layers = tuple(
        _layer(linear, fates[name], schemes[name], sources, layer_bytes.get(name, 0))
        for name, linear in structure.linears.items()
    )
    not_portable = _not_portable(structure, layers)
    return Plan(
        _split(tasks, max_shard_bytes),
        layers,
        structure.dense,
        config,
        assignments,
        not_portable,
        _model_config(checkpoint, structure, config, assignments, untied),
        checkpoint.nbytes,
        (*checkpoint.notes, *(one.text for one in notes)),
        readers=readers_beside(notes) if portable and structure.model_class else (),
        warnings=(
            *dense_parts(_stays_dense(structure, fates), checkpoint.tensors),
            *packed_table(structure.linears, not_portable),
        ),
    )


def _beside(
    structure: Structure,
    fates: Mapping[str, Fate],
    schemes: Mapping[str, Scheme | None],
    sources: Mapping[str, StoredTensor],
    container: Container,
) -> dict[str, tuple[StoredTensor, ...]]:
    """Return the other matrices that share a matrix's global or per-tensor scale: their sources, by its name.

    Engines fuse the matrices of such a set, and use its largest scale for all. quantkit joins linears, not
    experts, that have one global scale, and neither a column scale nor code books of their own.
    """
    portable = container == "compressed-tensors"
    chosen = {
        one: (linear.shape[1], schemes[linear.module], fates[linear.module].method)
        for linear in structure.linears.values()
        if portable or linear.kind != "experts"
        for one in linear.stored
    }
    found: dict[str, tuple[StoredTensor, ...]] = {}
    for members in fused_sets(chosen):
        ((columns, scheme, _), *others) = set(members.values())
        if others or scheme is None or not (scheme.global_scale or scheme.per_tensor):
            continue
        joined = scheme.global_scale and not (scheme.column_scale or scheme.is_fitted)
        if compressed_tensors_format(scheme, columns).fused if portable else joined:
            found |= {one: tuple(sources[other] for other in members if other != one) for one in members}
    return found


def _sources(checkpoint: Checkpoint, structure: Structure) -> dict[str, StoredTensor]:
    """Return the source tensor of each stored linear, by its name without `.weight`."""
    sources = {}
    for linear in structure.linears.values():
        for one in linear.stored:
            found = checkpoint.tensors.get(f"{one}.weight")
            if found is None:
                assert linear.kind == "lm_head" and structure.embedding is not None
                found = checkpoint.tensors[structure.embedding]
            sources[one] = found
    return sources


def _in_file_order(
    checkpoint: Checkpoint, sources: Mapping[str, StoredTensor]
) -> list[tuple[str, StoredTensor]]:
    """List all tensors to write in the order of the files, by stored name (linears without `.weight`)."""
    ordered = []
    for name, tensor in checkpoint.tensors.items():
        short = name.removesuffix(".weight")
        ordered.append((short if short in sources else name, tensor))
    written = {name for name, _ in ordered}
    return ordered + [(name, tensor) for name, tensor in sources.items() if name not in written]


def _packing_task(
    name: str, source: StoredTensor, linear: Linear, scheme: Scheme, fate: Fate, container: Container
) -> Task:
    if source.dtype not in QUANTIZABLE_DTYPES:
        raise CheckpointError(
            f"{source.name!r} is {source.dtype}; quantkit quantizes {', '.join(sorted(QUANTIZABLE_DTYPES))}. "
            f"Convert it first, or keep it dense with --rule '{linear.module}=keep'."
        )
    stored = stored_format(scheme, linear.shape[1], container)
    parts = tuple(
        (part, TensorSpec(stored.part_name(f"{name}.weight", part), SAFETENSORS_DTYPES[dtype], shape))
        for part, (dtype, shape) in stored.shapes(scheme.storage_shapes(linear.shape)).items()
    )
    outputs = tuple(spec for _, spec in parts)
    return Task(source, outputs, linear.module, scheme, fate.method, parts)


def _layer(
    linear: Linear,
    fate: Fate,
    scheme: Scheme | None,
    sources: Mapping[str, StoredTensor],
    output_bytes: int,
) -> LayerPlan:
    rows, columns = linear.shape
    return LayerPlan(
        linear,
        fate,
        scheme,
        rows * columns * len(linear.stored),
        sum(sources[one].nbytes for one in linear.stored),
        output_bytes,
    )


def _is_cut(structure: Structure, linear: Linear) -> bool:
    """Return True if source and model class store the matrices of a linear in one tensor."""
    if structure.kept.get(linear.module) == NOT_A_PARAMETER:
        return False
    return any(f"{one}.weight" in structure.cuts for one in linear.stored[:1])


def _not_portable(structure: Structure, layers: Sequence[LayerPlan]) -> tuple[str, ...]:
    """Return why the output needs quantkit to load, by layer; empty if compressed-tensors can express it."""
    reasons = []
    for layer in layers:
        if layer.scheme is not None and layer.linear.kind == "embedding":
            reasons.append(f"{layer.linear.module}: {PACKED_TABLE}")
        elif layer.scheme is not None and layer.linear.transposed:
            reasons.append(f"{layer.linear.module}: other readers have no packed form of its class")
        elif layer.scheme is not None:
            experts = layer.linear.kind == "experts"
            reason = why_not_compressed_tensors(layer.scheme, layer.linear.shape[1], experts=experts)
            if reason is None and _is_cut(structure, layer.linear):
                reason = CUT
            if reason is not None:
                reasons.append(f"{layer.linear.module}: {reason}")
    return tuple(reasons)


def _split(tasks: Sequence[Task], max_shard_bytes: int) -> tuple[Shard, ...]:
    groups: list[list[Task]] = [[]]
    size = 0
    for task in tasks:
        if groups[-1] and size + task.nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(task)
        size += task.nbytes
    if len(groups) == 1:
        return (Shard("model.safetensors", tuple(groups[0])),)
    return tuple(
        Shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", tuple(group))
        for i, group in enumerate(groups, 1)
    )


def _stays_dense(structure: Structure, fates: Mapping[str, Fate]) -> dict[str, str]:
    """Return the stored tensors that no rule packs, with the reason."""
    kept = [name for name, reason in structure.kept.items() if fates[name].reason == reason]
    return {
        **{f"{one}.weight": structure.kept[name] for name in kept for one in structure.linears[name].stored},
        **structure.dense,
    }


def _untied_head(structure: Structure, schemes: Mapping[str, Scheme | None]) -> str | None:
    """Return the name of a packed lm_head that was tied to the embedding; None if there is none."""
    heads = (one for one in structure.linears.values() if one.kind == "lm_head" and one.stored)
    return next((one.module for one in heads if structure.tied and schemes[one.module] is not None), None)


def _model_config(
    checkpoint: Checkpoint,
    structure: Structure,
    config: QuantizationConfig,
    assignments: Sequence[Assignment],
    untied: str | None,
) -> dict[str, Any]:
    """Return config.json of the source with `quantization_config`; untied if lm_head is packed separately.

    `architectures` names the class whose tensor names the files have.
    """
    merged = {**checkpoint.config, "quantization_config": config.to_dict(assignments)}
    if untied is not None:
        merged["tie_word_embeddings"] = False
        text = merged.get("text_config")
        if isinstance(text, dict):
            merged["text_config"] = {**text, "tie_word_embeddings": False}
    if structure.model_class not in ("", *named_classes(checkpoint.config)):
        merged["architectures"] = [structure.model_class]
    return merged

"""Warn about consequences of a plan for other tools, memory and speed, before the run."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from quantkit.checkpoint.compressed_tensors import compressed_tensors_format
from quantkit.checkpoint.engine_support import refusals
from quantkit.checkpoint.engines import ENGINES, FUSED, SGLANG, TRANSFORMERS, VLLM, reordered
from quantkit.checkpoint.quantization_config import Assignment
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import first_of
from quantkit.model.model_class import named_classes
from quantkit.model.structure import EMBEDDING, NOT_A_PARAMETER, TIED
from quantkit.packing.schemes import Scheme

if TYPE_CHECKING:
    from quantkit.model.structure import Structure

#: Linears of a layer or expert that inference engines fuse into one, which has a single scheme.
_FUSED = (*FUSED.values(), ("w1", "w3"))

#: Names by which SGLang detects how the experts of a layer are stored.
EXPERTS_OF_SGLANG = {"gate_proj", "up_proj", "down_proj", "gate_up_proj"}

#: Part of all weights from which a dense part of the model is worth a warning.
LARGE = 0.1

T = TypeVar("T")


def split_fusions(schemes: Mapping[str, Scheme | None]) -> tuple[str, ...]:
    """Return a text for each set of linears that engines fuse but `schemes` treats differently."""
    return tuple(
        ", ".join(f"{name} {scheme or 'dense'}" for name, scheme in members.items())
        for members in fused_sets(schemes)
        if len(set(members.values())) > 1
    )


@dataclass(frozen=True)
class Note:
    """Text for the user, and the tools, with a version or not, that therefore cannot read the result."""

    text: str
    cannot: tuple[str, ...] = ()


def plan_notes(
    config: Mapping[str, Any],
    structure: "Structure",
    schemes: Mapping[str, Scheme | None],
    assignments: Iterable[Assignment],
    container: str,
    untied: str | None,
) -> tuple[Note, ...]:
    """Return notes on storing the linears of `structure` in `schemes`; `untied` is a formerly tied head.

    `config` is config.json of the source. `assignments` are the linears as described in the file.
    """
    notes = list(reader_notes(config, assignments)) if container == "compressed-tensors" else []
    named = named_classes(config)
    if structure.model_class not in ("", *named):
        names = f"names {', '.join(named)}" if named else "names no class"
        notes.append(
            Note(
                f"config.json {names}; the tensors are those of {structure.model_class}, which the output "
                "names."
            )
        )
    if untied is not None:
        notes.append(
            Note(f"{untied} and the embedding are stored apart: packed, it can no longer be tied to it.")
        )
    notes += _notes_on_other_parts(structure, schemes)
    if structure.row_cuts:
        first, others = next(iter(structure.row_cuts)), len(structure.row_cuts) - 1
        notes.append(
            Note(
                f"vLLM and SGLang may not load this: {first} and {others} more are rows of larger tensors in "
                "the source, and stored under the names that transformers splits them into.",
                ("vLLM", "SGLang"),
            )
        )
    fitted = [name for name, scheme in schemes.items() if scheme is not None and scheme.is_fitted]
    if fitted:
        notes.append(
            Note(
                f"on a GPU, {first_of(fitted, kind='linears')} will take longer than int4: the values of "
                "fitted code books are looked up. Where speed counts take other formats; --bits-per-weight "
                "chooses among --formats."
            )
        )
    return tuple(notes)


def dense_parts(dense: Mapping[str, str], tensors: Mapping[str, TensorSpec]) -> tuple[str, ...]:
    """Return warnings about dense tensors with a large share of the weights, embeddings excepted.

    `dense` are tensor names with the reason why each stays dense.
    """
    return tuple(
        f"{share:.0%} of the weights stay dense: {text}."
        for share, text in _shares(dense, tensors)
        if share > LARGE
    )


def why_nothing(structure: "Structure", tensors: Mapping[str, TensorSpec]) -> str:
    """Return why no linear of a plan is packed, and what to do."""
    usual = [one for name, one in structure.linears.items() if name not in structure.kept]
    if any(one.kind != "lm_head" for one in usual):
        return (
            "the recipe keeps every linear. Leave out its rules with keep, or choose a format for some, such "
            f"as --rule '{usual[0].module}=int8'."
        )
    share, text = max(_shares(structure.dense, tensors), key=lambda one: one[0], default=(0.0, ""))
    most = f", and {share:.0%} of its weights are {text}" if text else ""
    what = structure.model_class or "the checkpoint"
    return f"{what} has no linear that quantkit packs{most}. Use the model as it is."


def _shares(dense: Mapping[str, str], tensors: Mapping[str, TensorSpec]) -> list[tuple[float, str]]:
    """Return for each reason to stay dense its share of all weights, and text that names its tensors.

    Embeddings, tied heads and tensors of one dimension are left out.
    """
    weights = sum(tensor.elements for tensor in tensors.values())
    names: dict[str, list[str]] = {}
    for name, reason in dense.items():
        if reason not in (EMBEDDING, TIED) and len(tensors[name].shape) > 1:
            names.setdefault(reason, []).append(name)
    shares = []
    for reason, those in names.items():
        share = sum(tensors[name].elements for name in those) / max(1, weights)
        shares.append((share, f"{first_of(those, kind='tensors')}: {reason}"))
    return shares


def reader_notes(config: Mapping[str, Any], assignments: Iterable[Assignment]) -> Iterator[Note]:
    """Yield notes on engines that cannot load a compressed-tensors checkpoint of these linears.

    `config` is config.json of the checkpoint or of its source.
    """
    assignments = tuple(assignments)
    yield from _notes_on_rows(config, assignments)
    packed = [(a, a.scheme) for a in assignments if a.scheme is not None]
    splits = split_fusions({a.module: a.scheme for a in assignments})
    if splits:
        yield Note(
            "vLLM and SGLang cannot load this: they fuse these linears, which then need one scheme: "
            f"{first_of(splits)}. Match each such set with rules of one format.",
            (VLLM.name, SGLANG.name),
        )
    stored = []
    narrow = set()
    experts: dict[str, set[str]] = {}
    for a, scheme in packed:
        row = compressed_tensors_format(scheme, a.shape[1])
        arguments = row.arguments(scheme, a.shape[1])
        stored.append(row.stored_as(a.module, a.kind, scheme, a.shape))
        if row.bfloat16:
            narrow.add(row.stored.name)
        if a.experts:
            how = json.dumps([row.stored.name, arguments])
            experts.setdefault(a.module.rpartition(".")[0], set()).add(how)
    refused = refusals(stored)
    for refusal in refused:
        yield Note(f"{refusal}", tuple(engine.name for engine in refusal.engines))
    if any(TRANSFORMERS in refusal.engines for refusal in refused):
        narrow.clear()
    if any(scheme.has_zero_point for _, scheme in packed):
        yield Note(
            "transformers without quantkit reads zero-points only with compressed-tensors up to 0.17, or "
            "with CompressedTensorsConfig(dequantize=True)."
        )
    if any(scheme.packing == "stream" for _, scheme in packed):
        yield Note(
            "transformers without quantkit reads the packing 'stream' with compressed-tensors 0.18 or newer; "
            "older ones, such as vLLM's 0.17, expect other words, and stop with an error."
        )
    if narrow:
        yield Note(
            f"transformers without quantkit runs {' and '.join(sorted(narrow))} with dtype=torch.bfloat16 "
            "only; it stops with an error otherwise."
        )
    yield from _notes_on_experts(experts)
    named = {a.stored[0].rpartition(".")[2] for a in assignments if a.experts}
    ways = {one for stored in experts.values() for one in stored}
    dense = any(a.experts and a.scheme is None for a in assignments)
    if named - EXPERTS_OF_SGLANG and len(ways) + dense > 1:
        yield Note(
            f"{SGLANG} and vLLM 0.26.0 cannot load this: they look for experts by the names "
            f"{', '.join(sorted(EXPERTS_OF_SGLANG))}, and take others, such as {min(named)}, to be stored as "
            "most linears are. Give all experts one format.",
            (SGLANG.name, f"{VLLM.name} 0.26.0"),
        )


def _notes_on_rows(config: Mapping[str, Any], assignments: Iterable[Assignment]) -> Iterator[Note]:
    """Yield notes on engines that reorder the rows of only some tensors of a linear."""
    for row in reordered(config):
        found = []
        for a in assignments:
            if a.scheme is not None:
                stored = compressed_tensors_format(a.scheme, a.shape[1]).stored
                parts = stored.shapes(a.scheme.storage_shapes(a.shape))
                names = {stored.part_name("weight", part) for part in parts}
                unfit = row.unfit(a.module, names, per_tensor=a.scheme.per_tensor)
                found += [] if unfit is None else [(a.module, unfit)]
        if found:
            fused = next((one for one in _FUSED if set(row.linears) <= set(one)), row.linears)
            rules = " ".join(f"--rule '*.{name}=keep'" for name in fused)
            does = "cannot load" if row.stops else "would compute wrong numbers, without an error, of"
            yield Note(
                f"{row.engine} {does} {first_of(name for name, _ in found)}: it reorders their rows as it "
                f"loads, and {found[0][1]} {'has none' if row.stops else 'stays as it is'}. Keep these, and "
                f"what is fused with them: {rules}.",
                (row.engine.name,),
            )


def readers_beside(notes: Iterable[Note]) -> tuple[str, ...]:
    """Return the names of the engines that no note rules out as readers of the checkpoint."""
    cannot = {name for one in notes for name in one.cannot}
    return tuple(engine.name for engine in ENGINES if engine.name not in cannot)


def _notes_on_experts(experts: Mapping[str, set[str]]) -> Iterator[Note]:
    """Yield notes on fused experts whose matrices are stored in several formats or group sizes.

    `experts` has by module, the experts of a layer, the texts of how its matrices are stored.
    """
    mixed = [name for name, stored in experts.items() if len(stored) > 1]
    if mixed:
        yield Note(
            "vLLM and SGLang cannot load this: they take gate, up and down of the experts of a layer to be "
            f"stored in one way, and those of {first_of(mixed)} are not. Give them one with a rule, such as "
            "--rule '*.experts.*=int4'.",
            (VLLM.name, SGLANG.name),
        )
    if len({one for stored in experts.values() for one in stored}) > 1:
        yield Note(
            "transformers without quantkit cannot load this: it takes all experts to be stored in one way. "
            "Give all of them one format and a group size that divides every row.",
            (TRANSFORMERS.name,),
        )


def fused_sets(linears: Mapping[str, T]) -> Iterator[dict[str, T]]:
    """Yield the sets of linears that inference engines fuse, with their values in `linears`."""
    for name in linears:
        parent, _, leaf = name.rpartition(".")
        for fused in _FUSED:
            if leaf == fused[0]:
                members = [f"{parent}.{other}" for other in fused]
                yield {member: linears[member] for member in members if member in linears}


def _notes_on_other_parts(structure: "Structure", schemes: Mapping[str, Scheme | None]) -> Iterator[Note]:
    """Yield notes on tensors that the model class lacks, such as extra prediction heads."""
    linears = [name for name, reason in structure.kept.items() if reason == NOT_A_PARAMETER]
    others = [name for name, reason in structure.dense.items() if reason.startswith(NOT_A_PARAMETER)]
    packed = [name for name in linears if schemes[name] is not None]
    names = [f"{one}.weight" for k in linears if schemes[k] is None for one in structure.linears[k].stored]
    # Experts that stay dense keep their one tensor for all.
    sources = [structure.cuts[name].source.name if name in structure.cuts else name for name in names]
    copied = [*dict.fromkeys(sources), *others]
    without = "not parameters of the model that config.json describes"
    if copied:
        first = linears[0] if linears else ""
        if first and structure.linears[first].kind == "experts":
            first = f"{first.rpartition('.')[0]}.*"
        rule = f" --rule '{first}=int8' packs some of them." if first and not packed else ""
        yield Note(
            f"{len(copied)} tensors, such as {copied[0]}, are {without}; they are copied, and declared as "
            f"dense.{rule}"
        )
    if packed:
        yield Note(
            f"{len(packed)} packed linears, such as {packed[0]}, are {without}: transformers and quantkit do "
            "not run them, and nothing compared their outputs."
        )

"""Refuse schemes that a model does not support, before planning."""

from collections.abc import Mapping

from quantkit.errors import UsageError
from quantkit.model.structure import Linear, Structure
from quantkit.packing.names import KV_PARTS
from quantkit.packing.schemes import Scheme
from quantkit.recipes.recipe import Fate


def _why_not_static(linear: Linear, fate: Fate) -> str | None:
    if linear.kind == "embedding":
        return "quantkit measures inputs of linears, and this is an embedding"
    if fate.method is not None and fate.method.input_scaling:
        return f"they are measured before {fate.method.name!r} divides the inputs"
    return None


def check_experts(structure: Structure, schemes: Mapping[str, Scheme | None]) -> None:
    """Raise `UsageError` unless all fused parameters of a set of experts are packed, or none."""
    fates: dict[str, set[bool]] = {}
    for name, linear in structure.linears.items():
        if linear.kind == "experts":
            fates.setdefault(name.rpartition(".")[0], set()).add(schemes[name] is None)
    for name, kinds in fates.items():
        if len(kinds) > 1:
            raise UsageError(
                f"the recipe packs some and keeps some of the matrices of {name!r}; experts are one module. "
                f"Match all of '{name}.*' with one rule."
            )


def check_kv_scales(schemes: Mapping[str, Scheme | None]) -> frozenset[str]:
    """Return the names of attention layers with packed k_proj and v_proj; `UsageError` without any."""
    found = {
        name.rpartition(".")[0] for name, scheme in schemes.items() if scheme and name.endswith(".k_proj")
    }
    alone = {
        f"{parent}.{leaf}" for parent in found for leaf in KV_PARTS if not schemes.get(f"{parent}.{leaf}")
    }
    if alone or not found:
        named = any(name.rpartition(".")[2] in KV_PARTS for name in schemes)
        what = "no k_proj and v_proj are packed" if named else "this model has no linears of these names"
        what = f"{min(alone)} is not packed" if alone else what
        raise UsageError(
            f"--kv-scales stores scales beside the packed k_proj and v_proj of each layer, and {what}. Pack "
            "them, or leave out --kv-scales: engines then take 1 for each scale."
        )
    return frozenset(found)


def check_activations(structure: Structure, fates: Mapping[str, Fate]) -> None:
    """Raise `UsageError` for activation schemes that a linear does not support: groups, or static scales."""
    for name, fate in fates.items():
        scheme = fate.scheme
        if scheme is None or scheme.activations is None:
            continue
        if (
            scheme.activations.static
            and (reason := _why_not_static(structure.linears[name], fate)) is not None
        ):
            raise UsageError(
                f"{name!r} cannot have static input scales: {reason}. Choose scales per token or group, as "
                f"--scheme FP8_DYNAMIC or MXFP4 have, or keep it dense with --rule '{name}=keep'."
            )
        reason = scheme.activations.why_not(structure.linears[name].shape[1])
        if reason is not None:
            raise UsageError(
                f"{name!r} cannot be packed as {scheme}: {reason}. Choose one scale per token, as "
                f"--scheme FP8_DYNAMIC or --activations fp8 have, or keep it dense with --rule '{name}=keep'."
            )

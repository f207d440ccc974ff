"""Refuse schemes that a model cannot have, before anything is planned."""

from collections.abc import Mapping

from quantkit.errors import UsageError
from quantkit.model.structure import Structure
from quantkit.packing.schemes import Scheme


def check_experts(structure: Structure, schemes: Mapping[str, Scheme | None]) -> None:
    """Check that all fused parameters of one set of experts are packed, or none is."""
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


def check_activations(structure: Structure, schemes: Mapping[str, Scheme | None]) -> None:
    """Check that the groups of rounded inputs divide the features of each linear."""
    for name, scheme in schemes.items():
        if scheme is None or scheme.activations is None:
            continue
        reason = scheme.activations.why_not(structure.linears[name].shape[1])
        if reason is not None:
            raise UsageError(
                f"{name!r} cannot be packed as {scheme}: {reason}. Choose one scale per token, as "
                f"--scheme FP8_DYNAMIC or --activations fp8 have, or keep it dense with --rule '{name}=keep'."
            )

"""Which schemes are measured for the linears and experts of a block."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.model.blocks import Block
from quantkit.model.experts import is_fused_experts
from quantkit.packing.schemes import Scheme
from quantkit.quantization.blockwise.input_ranges import Expert, Wanted


@dataclass(frozen=True)
class BlockSchemes:
    """Schemes to measure in a block, by linear and by fused parameter of experts.

    Names are relative to the block. `static` are linears and experts whose largest input is needed. `work`
    are the units of progress of all matrices.
    """

    linears: Mapping[str, Sequence[Scheme]]
    experts: Mapping[str, Mapping[str, Sequence[Scheme]]]
    static: Wanted
    work: int

    def of(self, linears: Sequence[str]) -> list[Scheme]:
        """Return the schemes of `linears`."""
        return [scheme for name in linears for scheme in self.linears[name]]

    @classmethod
    def within(
        cls,
        block: Block,
        schemes: Mapping[str, Sequence[Scheme]],
        work_of: Callable[[Sequence[Scheme]], int],
    ) -> "BlockSchemes":
        """Find the linears and experts of `block` in `schemes`; `work_of` gives the units of a matrix."""
        linears: dict[str, Sequence[Scheme]] = {}
        experts: dict[str, dict[str, Sequence[Scheme]]] = {}
        static, work = dict[str, Expert](), 0
        for full, row in schemes.items():
            if not f"{full}.".startswith(f"{block.name}."):
                continue
            # "" for a linear that is a block of its own.
            name = full.removeprefix(block.name).removeprefix(".")
            owner, _, leaf = name.rpartition(".")
            module: Any = block.module.get_submodule(owner)
            if is_fused_experts(module):
                experts.setdefault(owner, {})[leaf] = row
                count = len(module.down_proj)
                work += work_of(row) * count
                if any(map(_is_static, row)):
                    static |= {f"{full}.{number}": (full, number) for number in range(count)}
            else:
                linears[name] = row
                work += work_of(row)
        alone = (block.full(name) for name, row in linears.items() if any(map(_is_static, row)))
        return cls(linears, experts, Wanted(frozenset(alone), frozenset(), static), work)


def _is_static(scheme: Scheme) -> bool:
    return scheme.activations is not None and scheme.activations.static

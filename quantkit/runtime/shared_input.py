"""Compute linears with the same input in one launch: q, k and v; gate and up.

The linears stay separate tensors in a checkpoint and separate modules in a model; only their kernel layouts
are joined, outside any state dict.

    q_proj(x)   one GEMM for q, k and v; returns its columns of y, keeps the others
    k_proj(x)   same tensor x: returns the columns that were kept for it
    v_proj(z)   another tensor: computes alone
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.linear import autocast, linear_parts
from quantkit.kernels.weight_layouts import join_layouts, most_joined_rows

if TYPE_CHECKING:
    from quantkit.runtime.packed_linear import PackedLinear

#: Names of modules that models call with one input, in this order. They affect speed only.
SIBLINGS: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Rows of x from which linears of equal size are computed one by one. Launches take little of the time there,
#: and parts of a joined output are not contiguous, so the next kernel reads them more slowly.
SEPARATE_ROWS = 1024

_Ref = weakref.ref[torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Joined:
    """Joined kernel layout and bias of all linears of a `SharedInput`.

    rows       output features N of each linear
    too_many   least M (rows of x) at which each linear computes alone
    """

    layout: KernelLayout
    bias: torch.Tensor | None
    rows: list[int]
    too_many: int


class SharedInput:
    """Packed linears of one scheme that a model calls with the same input, in the order of the calls."""

    def __init__(self, members: Sequence["PackedLinear"]) -> None:
        # Weak references, because members refer to this: else only the garbage collector could free a model.
        self._members = tuple(map(weakref.ref, members))
        self._joined: dict[torch.dtype, _Joined] = {}
        #: Parameters of words and bias of each member, at the time of joining.
        self._owners: tuple[tuple[_Ref | None, _Ref | None], ...] = ()
        self._x: torch.Tensor | None = None
        self._rest: dict[int, torch.Tensor] = {}
        for index, member in enumerate(members):
            member.share(self, index)

    def build(self, dtype: torch.dtype) -> None:
        """Build the layouts of the linears for activations of `dtype`, and join them if possible.

        The linears keep views of the joined layout, so it takes no extra memory.
        """
        members = self._living()
        layouts = [layout for member in members if (layout := member.layout(dtype)) is not None]
        biases = [bias for member in members if (bias := member.own_bias) is not None]
        if len(layouts) < len(self._members) or len(biases) not in (0, len(self._members)):
            return
        if len({member.inputs_of("weight") for member in members}) > 1:
            # Static scales of another tool may differ, though the input is one.
            return
        # Rows of the local shard, under tensor parallelism.
        rows = [member.words.shape[0] for member in members]
        joined = join_layouts(layouts, rows, members[0].scheme.of_weights, members[0].in_features)
        if joined is None or any(bias.dtype != dtype for bias in biases):
            return
        whole, parts = joined
        for member, part in zip(members, parts, strict=True):
            member.replace_layout(part)
        self._owners = tuple(
            (_reference(words), _reference(bias))
            for words, bias in (member.word_and_bias_parameters() for member in members)
        )
        too_many = min(most_joined_rows(whole) + 1, SEPARATE_ROWS if len(set(rows)) == 1 else sys.maxsize)
        self._joined[dtype] = _Joined(whole, _join(biases), rows, too_many)

    def drop(self) -> None:
        """Drop the joined kernel layouts, and the outputs that were kept for later calls."""
        self._joined.clear()
        self._forget()

    def product(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return y [..., N] of linear `index` for x [..., K]; None if that linear must compute y itself.

        The call for linear 0 computes y of all linears. Calls of the others return theirs, if x is the same.
        """
        if self._x is x and index in self._rest:
            y = self._rest.pop(index)
            if not self._rest:
                self._forget()
            return y
        self._forget()
        if index:
            return None
        operand = autocast(x)
        joined = self._joined.get(operand.dtype)
        if joined is None or operand.numel() >= joined.too_many * operand.shape[-1]:
            return None
        members = self._living()
        if not self._valid(members):
            return None
        operand = members[0].operand("weight", operand)
        y = linear_parts(operand, (), joined.bias, members[0].token(), sum(joined.rows), joined.layout)
        first, *rest = y.split_with_sizes(joined.rows, -1)
        self._x, self._rest = x, dict(enumerate(rest, 1))
        return first

    def _living(self) -> list["PackedLinear"]:
        """Return the linears that still exist: modules of a model may have been replaced."""
        members = [reference() for reference in self._members]
        return [member for member in members if member is not None]

    def _valid(self, members: Sequence["PackedLinear"]) -> bool:
        """Return True if the joined layout was made of the current words and biases of all `members`."""
        return len(members) == len(self._owners) and all(
            _refers(of_words, words) and _refers(of_bias, bias)
            for (of_words, of_bias), (words, bias) in zip(
                self._owners, [member.word_and_bias_parameters() for member in members], strict=True
            )
        )

    def _forget(self) -> None:
        self._x, self._rest = None, {}


def _join(biases: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Concatenate `biases` to [sum N] and make each of them a view of the result; None without biases."""
    if not biases:
        return None
    with torch.inference_mode(False):
        whole = torch.cat([bias.detach() for bias in biases])
        for bias, part in zip(biases, torch.split(whole, [len(bias) for bias in biases]), strict=True):
            bias.data = part
    return whole


def _reference(tensor: torch.Tensor | None) -> _Ref | None:
    return None if tensor is None else weakref.ref(tensor)


def _refers(reference: _Ref | None, tensor: torch.Tensor | None) -> bool:
    return reference is None if tensor is None else reference is not None and reference() is tensor


def shared_inputs(model: nn.Module) -> Iterator[SharedInput]:
    """Yield a `SharedInput` for each group of linears of `model` that share an input and are packed alike.

    The linears are found by the names in `SIBLINGS`.
    """
    from quantkit.runtime.packed_linear import PackedLinear

    for parent in model.modules():
        for names in SIBLINGS:
            siblings = [parent._modules.get(name) for name in names]
            members = [module for module in siblings if isinstance(module, PackedLinear)]
            alike = {(member.scheme, member.in_features) for member in members}
            # Excluded: members with their own column scales, which change x, and members whose x tensor
            # parallelism may replace by an equal tensor.
            own = any(member.scheme.column_scale or not member.shares_x for member in members)
            if len(members) == len(names) and len(alike) == 1 and not own:
                yield SharedInput(members)

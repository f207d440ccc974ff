"""Linears that are called one after the other with the same input, computed by one launch.

q, k and v, and gate and up, are separate tensors in a checkpoint and separate modules in a model, whose code
is transformers'. Here they stay so: what is joined are their kernel layouts, which no state dict has. The
first module that is called computes the product for all; each of the others, if it is called with that very
tensor, takes its part of it. A module that is called with anything else computes its own.
"""

import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.linear import autocast, join_layouts, linear_parts, most_joined_rows

if TYPE_CHECKING:
    from quantkit.runtime.packed_linear import PackedLinear

#: Names of modules that models call with one input, in this order. Nothing but speed depends on them.
SIBLINGS: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: Rows of x from which weights of one size are multiplied with one by one. Launching takes no time beside
#: that, and parts of a joined output are not contiguous, so that what comes next reads them more slowly.
APART = 1024

_Ref = weakref.ref[torch.Tensor]


@dataclass(frozen=True, eq=False)
class _Joined:
    """The layout and the bias of all members together, and how many of their rows each has."""

    layout: KernelLayout
    bias: torch.Tensor | None
    rows: list[int]
    #: Rows of x that are too many for the product of all.
    too_many: int


class SharedInput:
    """Packed linears of one scheme with the same input, in the order in which they are called."""

    def __init__(self, members: Sequence["PackedLinear"]) -> None:
        # Weak, as the members have this: freeing a model would have to wait for the garbage collector.
        self._members = tuple(map(weakref.ref, members))
        self._joined: dict[torch.dtype, _Joined] = {}
        #: The parameters of the words of each member, and of its bias if it has one.
        self._owners: tuple[tuple[_Ref | None, _Ref | None], ...] = ()
        self._x: torch.Tensor | None = None
        self._rest: dict[int, torch.Tensor] = {}
        for index, member in enumerate(members):
            member.share(self, index)

    def build(self, dtype: torch.dtype) -> None:
        """Build the members' layouts for activations of `dtype` and join them, if they can be.

        The members keep views of the whole, so that it takes no more memory.
        """
        members = self._present()
        layouts = [layout for member in members if (layout := member.layout(dtype)) is not None]
        biases = [bias for member in members if (bias := member.own_bias) is not None]
        if len(layouts) < len(self._members) or len(biases) not in (0, len(self._members)):
            return
        # A tensor-parallel rank has a shard of them.
        rows = [member.words.shape[0] for member in members]
        joined = join_layouts(layouts, rows, members[0].scheme, members[0].in_features)
        if joined is None or any(bias.dtype != dtype for bias in biases):
            return
        whole, parts = joined
        for member, part in zip(members, parts, strict=True):
            member.replace_layout(part)
        self._owners = tuple(
            (_reference(words), _reference(bias)) for words, bias in (member.held() for member in members)
        )
        too_many = min(most_joined_rows(whole) + 1, APART if len(set(rows)) == 1 else sys.maxsize)
        self._joined[dtype] = _Joined(whole, _join(biases), rows, too_many)

    def drop(self) -> None:
        """Forget the joined layouts: those of a member are no longer valid."""
        self._joined.clear()
        self._forget()

    def product(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """x W^T + b of member number `index`; None where it has to compute that by itself."""
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
        members = self._present()
        if not self._valid(members):
            return None
        y = linear_parts(operand, (), joined.bias, members[0].token(), sum(joined.rows), joined.layout)
        first, *rest = y.split_with_sizes(joined.rows, -1)
        self._x, self._rest = x, dict(enumerate(rest, 1))
        return first

    def _present(self) -> list["PackedLinear"]:
        """The members that there still are: a module of the model may have been replaced."""
        found = [reference() for reference in self._members]
        return [member for member in found if member is not None]

    def _valid(self, members: Sequence["PackedLinear"]) -> bool:
        """Whether what was joined are the words and biases that the members, all present, have now."""
        return len(members) == len(self._owners) and all(
            _refers(of_words, words) and _refers(of_bias, bias)
            for (of_words, of_bias), (words, bias) in zip(
                self._owners, [member.held() for member in members], strict=True
            )
        )

    def _forget(self) -> None:
        self._x, self._rest = None, {}


def _join(biases: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Biases one after the other, None without; each is a view of them then, as are layouts."""
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
    """The siblings of `model` that are packed alike."""
    from quantkit.runtime.packed_linear import PackedLinear

    for parent in model.modules():
        for names in SIBLINGS:
            found = [parent._modules.get(name) for name in names]
            members = [module for module in found if isinstance(module, PackedLinear)]
            alike = {(member.scheme, member.in_features) for member in members}
            # Column scales of its own are what each has to multiply x with; where ranks divide linears,
            # transformers may give each another tensor with the numbers of x.
            own = any(member.scheme.column_scale or not member.shares_x for member in members)
            if len(members) == len(names) and len(alike) == 1 and not own:
                yield SharedInput(members)

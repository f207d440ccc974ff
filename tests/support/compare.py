"""Compare tensors, and say where they differ and by how much."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: `rtol` and `atol` of `assert_close` by dtype, the same as those of `torch.testing`.
TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


@dataclass(frozen=True)
class Rule:
    """When two tensors are close: the arguments of `assert_close`."""

    rtol: float | None
    atol: float | torch.Tensor | None
    norm: float | None
    equal_nan: bool

    def bound(self, expected: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """How far each element may be from that of `expected`, which was of `dtype`."""
        rtol, atol = self.rtol, self.atol
        if rtol is None or atol is None:
            rtol, atol = TOLERANCES.get(dtype, (0.0, 0.0))
        if rtol:
            return atol + rtol * expected.abs()
        return torch.as_tensor(atol, device=expected.device).expand_as(expected)


def assert_close(
    found: Any,
    expected: Any,
    *,
    rtol: float | None = None,
    atol: float | torch.Tensor | None = None,
    norm: float | None = None,
    equal_nan: bool = False,
    name: object = "",
) -> None:
    """Fail unless |found - expected| <= atol + rtol * |expected| everywhere, and dtypes and shapes match.

    Args:
        found: A tensor, a number, or a sequence or mapping of them.
        expected: The same with what is right.
        rtol: Both tolerances or none; without them `TOLERANCES` has those of the dtype of `found`.
        atol: A number, or a tensor of the shape of `expected` with the bound of each element.
        norm: In place of both: the largest Frobenius norm of the difference, as a part of that of `expected`.
        equal_nan: Whether NaN is close to NaN.
        name: Of what is compared, such as the case of a loop, for the message.
    """
    __tracebackhide__ = True
    assert (rtol is None) == (atol is None), "rtol and atol come together"
    rule = Rule(rtol, atol, norm, equal_nan)
    if problem := _difference(found, expected, rule, str(name)):
        raise AssertionError(problem)


def assert_equal(found: Any, expected: Any, name: object = "") -> None:
    """Fail unless tensors, or sequences or mappings of them, have the same dtype, shape and elements."""
    __tracebackhide__ = True
    assert_close(found, expected, rtol=0, atol=0, name=name)


def _difference(found: Any, expected: Any, rule: Rule, name: str) -> str:
    """What to say of the first difference; empty if there is none."""
    if isinstance(expected, torch.Tensor):
        return _of_tensors(found, expected, rule, name)
    if isinstance(expected, Mapping):
        if set(found) != set(expected):
            return f"{name} has keys {sorted(found)}, expected {sorted(expected)}".lstrip()
        pairs = [(key, found[key], expected[key]) for key in expected]
    elif isinstance(expected, Sequence) and not isinstance(expected, str):
        if len(found) != len(expected):
            return f"{name} has {len(found)} items, expected {len(expected)}".lstrip()
        pairs = [(index, one, other) for index, (one, other) in enumerate(zip(found, expected, strict=True))]
    elif isinstance(expected, float):
        pair = [torch.tensor(float(value), dtype=torch.float64) for value in (found, expected)]
        return _of_tensors(*pair, rule, name)
    else:
        return (
            "" if found == expected else f"{name}: found {found!r}, expected {expected!r}".removeprefix(": ")
        )
    problems = (_difference(a, b, rule, f"{name}[{key!r}]") for key, a, b in pairs)
    return next(filter(None, problems), "")


def _of_tensors(found: Any, expected: torch.Tensor, rule: Rule, name: str) -> str:
    title = name or "tensors"
    if not isinstance(found, torch.Tensor):
        return f"{title}: found a {type(found).__name__}, expected a tensor"
    for what in ("shape", "dtype", "device"):
        one, other = getattr(found, what), getattr(expected, what)
        if one != other:
            show = tuple if what == "shape" else str
            return f"{title} differ in {what}: found {show(one)}, expected {show(other)}"
    one, other = _wide(found.detach()), _wide(expected.detach())
    if rule.norm is not None:
        part = float((one - other).norm() / other.norm())
        if part <= rule.norm:
            return ""
        share = f"by {part:.3g} of the norm, {rule.norm:.3g} allowed; "
        return f"{title} differ {share}{_report(one, other, torch.zeros_like(other), one == other)}"
    bound = rule.bound(other, found.dtype)
    # Where a value is infinite, so is its bound, and a difference may be NaN: it is close if it is equal.
    close = (one == other) | ((one - other).abs() <= bound) & other.isfinite()
    if rule.equal_nan:
        close |= one.isnan() & other.isnan()
    return "" if close.all() else f"{title} differ: {_report(one, other, bound, close)}"


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a dtype in which differences do not overflow."""
    if tensor.is_complex():
        return torch.view_as_real(tensor).double()
    return tensor.double() if tensor.is_floating_point() else tensor.long()


def _report(one: torch.Tensor, other: torch.Tensor, bound: torch.Tensor, close: torch.Tensor) -> str:
    """How many elements differ, which differs most, and NaN on both sides."""
    apart = (one - other).abs().double().masked_fill(close, -1)
    # NaN beside a number differs most.
    flat = int(apart.nan_to_num(nan=torch.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), apart.shape)]
    found, expected, difference, allowed = (t.flatten()[flat].item() for t in (one, other, apart, bound))
    parts = [
        f"{int((~close).sum())} of {close.numel()} elements",
        f"most at {index}: found {_shown(found)}, expected {_shown(expected)}, "
        f"{difference:.3g} apart, {allowed:.3g} allowed",
    ]
    nans = [int(tensor.isnan().sum()) for tensor in (one, other)]
    if any(nans):
        parts.append(f"NaN: {nans[0]} found, {nans[1]} expected")
    return "; ".join(parts)


def _shown(value: float) -> str:
    """All digits of an integer, and of a number those of float32."""
    return str(value) if isinstance(value, int) else f"{value:.9g}"

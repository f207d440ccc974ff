"""What the kernel tests share: packed tensors with known weights, and the fp64 product of them."""

from collections.abc import Callable, Iterator
from typing import Literal

import pytest
import torch

from quantkit.kernels.table import FORCE_VARIABLE, VERBOSE_VARIABLE
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_VARIABLE, raising=False)
    monkeypatch.delenv(VERBOSE_VARIABLE, raising=False)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uninitialised memory comes full of NaN, or of a code nobody wrote."""
    empty = torch.empty

    def poisoned_empty(*args: object, **kwargs: object) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 85)

    monkeypatch.setattr(torch, "empty", poisoned_empty)
    yield


@pytest.fixture
def make_packed() -> Callable[..., PackedTensor]:
    def make(
        name: str,
        shape: tuple[int, int],
        *,
        group_size: int | Literal["channel"] | None = None,
        asymmetric: bool = False,
        scale_dtype: torch.dtype = torch.bfloat16,
        exact: bool = False,
        seed: int = 0,
    ) -> PackedTensor:
        """Random codes and zero-points; scales powers of two when `exact`, else random."""
        generator = torch.Generator().manual_seed(seed)
        layout = scheme(name, group_size=group_size, zero_point="integer" if asymmetric else "none", scale_dtype=scale_dtype)
        rows, columns = shape
        top, groups = 2**layout.format.bits, layout.groups(columns)
        codes = torch.randint(0, top, shape, generator=generator, dtype=torch.uint8)
        zeros = torch.randint(0, top, (rows, groups), generator=generator, dtype=torch.uint8)
        if exact:
            scale = torch.exp2(torch.randint(-1, 2, (rows, groups), generator=generator).float())
        else:
            scale = torch.rand(rows, groups, generator=generator) + 0.5
        return PackedTensor.from_codes(codes, scale, zeros if asymmetric else None, layout)

    return make


@pytest.fixture
def reference() -> Callable[..., torch.Tensor]:
    def product(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The slow twin: dequantize everything and multiply in float64."""
        y = x.double() @ packed.dequantize().double().T
        return y if bias is None else y + bias.double()

    return product


@pytest.fixture
def relative_error() -> Callable[[torch.Tensor, torch.Tensor], float]:
    def error(y: torch.Tensor, expected: torch.Tensor) -> float:
        """Relative Frobenius error against float64."""
        return ((y.double() - expected).norm() / expected.norm()).item()

    return error

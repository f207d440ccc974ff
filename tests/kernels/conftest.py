"""What the kernel tests share: packed tensors with known weights, and the fp64 product of them."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from quantkit.kernels.gemm import operands
from quantkit.kernels.registry import FORCE_VARIABLE, VERBOSE_VARIABLE
from quantkit.kernels.tuning.store import TILES_VARIABLE
from quantkit.packing.schemes import GroupSize, scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.zero_points import ZeroPoint

from . import bfloat16, gluon, memory


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FORCE_VARIABLE, raising=False)
    monkeypatch.delenv(VERBOSE_VARIABLE, raising=False)
    # Whoever runs the tests may have tuned this GPU.
    monkeypatch.setenv(TILES_VARIABLE, "none")


#: Modules in Gluon, those first that others import.
GLUON = {
    f"quantkit.kernels.{name}": Path(operands.__file__).parents[1] / f"{name.replace('.', '/')}.py"
    for name in (
        "gluon.dequant_fragment",
        "gluon.stream_k",
        "gluon.x_rows",
        "gluon.x_digits",
        "gluon.stage_x_per_warp",
        "gluon.scales_registers",
        "gluon.scales_smem",
        "gluon.epilogue",
        "gluon.stage_x_shared",
        "gemm.wgmma.wgmma_operand",
        "gemm.wgmma.wgmma_kernel",
        "gemm.wgmma_8bit.wgmma_8bit_kernel",
        "gemm.small_m.small_m_product",
        "gemm.small_m.small_m_kernel",
        "gemm.decode.decode_product",
        "gemm.decode.decode_kernel",
    )
}
_interpreted = cache(lambda: gluon.interpreted(GLUON))


@pytest.fixture
def by_address() -> list[torch.Tensor]:
    """What kernels find by addresses in memory, filled by tests."""
    return []


@pytest.fixture(autouse=True)
def _interpreter(interpreter: bool, by_address: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows all that kernels have, and is a GPU of few multiprocessors."""
    if not interpreter:
        return
    gluon.teach(monkeypatch)
    bfloat16.teach(monkeypatch)
    memory.teach(monkeypatch, by_address)
    for name, module in _interpreted().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(operands, "multiprocessors_of", lambda device: 3)


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
        group_size: GroupSize = None,
        zero_point: ZeroPoint = "none",
        scale_dtype: torch.dtype | None = None,
        exact: bool = False,
        seed: int = 0,
    ) -> PackedTensor:
        """Random codes and zero-points; scales powers of two when `exact`, else random."""
        generator = torch.Generator().manual_seed(seed)
        layout = scheme(name, group_size=group_size, zero_point=zero_point, scale_dtype=scale_dtype)
        rows, columns = shape
        top, groups = 2**layout.format.bits, layout.groups(columns)
        _, scales = layout.storage_shapes(shape)["scale"]
        values = (0.0,) * top if layout.is_fitted else layout.format.values
        numbers = torch.tensor([c for c, v in enumerate(values) if v == v], dtype=torch.uint8)
        codes = torch.zeros(shape, dtype=torch.uint8)
        for _ in range(layout.planes):
            plane = numbers[torch.randint(0, len(numbers), shape, generator=generator)]
            codes = (codes << layout.format.bits) | plane
        zeros = torch.randint(0, top, (rows, groups), generator=generator, dtype=torch.uint8)
        if exact:
            scale = torch.exp2(torch.randint(-1, 2, scales, generator=generator).float())
        else:
            # Weights that float16 can hold.
            spread = torch.rand(scales, generator=generator) + 0.5
            scale = spread * min(1, 448 / layout.format.max)
        # Weights that bfloat16 can hold.
        between = 0.5 if layout.zero_point_type.is_continuous and layout.format.bits < 8 else 0
        stored_zeros = (zeros + between).to(layout.zero_point_dtype) if layout.has_zero_point else None
        global_scale = torch.tensor([4.0 if exact else 3.7]) if layout.global_scale else None
        factors = torch.exp2(torch.randint(-1, 2, (columns,), generator=generator).float())
        if not exact:
            factors *= torch.rand(columns, generator=generator) + 0.5
        return PackedTensor.from_codes(
            codes,
            scale,
            stored_zeros,
            layout,
            global_scale,
            column_scale=factors.to(layout.column_scale_dtype) if layout.column_scale else None,
            codebook=torch.linspace(-1, 1, top) if layout.is_fitted else None,
        )

    return make


@pytest.fixture
def reference() -> Callable[..., torch.Tensor]:
    def product(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The slow twin: dequantize everything and multiply in float64."""
        y = x.double() @ packed.dequantize().double().T
        return y if bias is None else y + bias.double()

    return product

"""What is said of packed weights that no kernel multiplies with."""

from typing import Any

import pytest
import torch
from torch import nn

from quantkit import quantize_tensor
from quantkit.kernels import problem
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.unpacked import unpacked


class Model(nn.Module):
    """Linears of these formats, in bfloat16 on a CPU."""

    dtype, device = torch.bfloat16, torch.device("cpu")

    def __init__(self, *weights: PackedTensor) -> None:
        super().__init__()
        self.linears = nn.ModuleList(PackedLinear.from_packed(weight, None) for weight in weights)


@pytest.mark.parametrize(
    ("features", "rows", "expected"),
    [
        ({"avx2"}, 1, ["2 packed parameters of fp6-e2m3", "not int-digits: this CPU has no VNNI"]),
        ({"avx2", "avx512", "vnni"}, 1, None),
        (
            {"avx2", "avx512", "vnni"},
            64,
            ["2 packed parameters of fp6-e2m3", "1 packed parameters of int4", "M above 32"],
        ),
    ],
)
def test_what_is_unpacked_is_said_by_scheme(
    monkeypatch: pytest.MonkeyPatch,
    features: set[str],
    rows: int,
    expected: Any,
) -> None:
    monkeypatch.setattr(problem, "_cpu_features", lambda: frozenset(features))
    problem.device_features.cache_clear()
    weights = [quantize_tensor(torch.ones(256, 256), name) for name in ("fp6", "fp6", "int4")]
    model = Model(*weights)
    lines = unpacked(model, rows)
    problem.device_features.cache_clear()
    assert (lines == ()) is (expected is None)
    for part in expected or ():
        assert any(part in line for line in lines), lines
    assert all(f"unpacked for every product at M={rows} (not torch-int4: " in line for line in lines)

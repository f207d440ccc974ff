"""Measure the quantization noise of schemes on weights drawn from two distributions, without a model.

The relative squared error of a layer predicts the cost of a scheme for a model well enough to rank schemes:
Malinovskii et al., "Pushing the Limits of Large Language Model Quantization via the Linearity Theorem" (arXiv
2411.17525). Gaussian weights model well-behaved or rotated layers. Student's t distribution with 5 degrees of
freedom models layers with outliers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from quantkit.calibrate.methods import quantize_tensor
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, scheme

#: Shape [N, K] for which bits per weight are computed.
NOMINAL_SHAPE = (4096, 4096)
#: Shape of the random weight, and its seed.
SAMPLE_SHAPE = (128, 4096)
SEED = 0
METHODS = ("rtn", "mse")
FREEDOM = 5

#: Further schemes without a preset, by label.
VARIANTS: dict[str, Scheme] = {
    "int4 g32 e4m3": scheme("int4", group_size=32, scale_dtype=torch.float8_e4m3fn),
    "int3 g32 e4m3": scheme("int3", group_size=32, scale_dtype=torch.float8_e4m3fn),
    "nf4 g32 e4m3": scheme("nf4", group_size=32, scale_dtype=torch.float8_e4m3fn),
    "int4 asym": scheme("int4", zero_point="integer"),
    "int4 asym-float": scheme("int4", zero_point="float"),
    "int3 asym-float": scheme("int3", zero_point="float"),
    "int2 asym-float": scheme("int2", zero_point="float"),
}

#: `report(done, total, label)` is called before each measurement.
Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Noise:
    """Relative squared errors of one scheme: `errors[method][distribution]` is |W - Q|^2 / |W|^2."""

    label: str
    scheme: Scheme
    #: Bits per weight of a weight of `NOMINAL_SHAPE`.
    bits_per_weight: float
    errors: Mapping[str, Mapping[str, float]]


def gaussian(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Draw unit normal weights, float32 [N, K]."""
    return torch.randn(shape, generator=generator)


def student_t(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Draw weights from Student's t distribution with `FREEDOM` degrees of freedom, float32 [N, K]."""
    normal = torch.randn(shape, generator=generator)
    return normal / torch.randn((FREEDOM, *shape), generator=generator).square_().mean(0).sqrt_()


#: Distributions of weights, by name.
DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], torch.Tensor]] = {
    "gaussian": gaussian,
    "student_t": student_t,
}


def bits_per_weight(chosen: Scheme, shape: tuple[int, int] = NOMINAL_SHAPE) -> float:
    """Return stored bits per weight for shape [N, K]: codes, padding, scales, zero-points and shape."""
    parts = chosen.storage_shapes(shape).values()
    return 8 * sum(dtype.itemsize * prod(size) for dtype, size in parts) / prod(shape)


def known_schemes() -> dict[str, Scheme]:
    """Return every preset and variant by label; presets with the same scheme share the last label."""
    labels = {scheme(name): name for name in PRESETS}
    return {label: chosen for chosen, label in labels.items()} | VARIANTS


def measure(
    schemes: Mapping[str, Scheme],
    *,
    methods: Iterable[str] = METHODS,
    shape: tuple[int, int] = SAMPLE_SHAPE,
    seed: int = SEED,
    report: Report | None = None,
) -> tuple[Noise, ...]:
    """Measure the noise of each scheme, in the order given, on one weight [N, K] of every distribution.

    Raises `FormatError` for a scheme that a method does not support.
    """
    weights = {name: draw(shape, torch.Generator().manual_seed(seed)) for name, draw in DISTRIBUTIONS.items()}
    methods, measured = tuple(methods), []
    for done, (label, chosen) in enumerate(schemes.items()):
        if report is not None:
            report(done, len(schemes), label)
        errors = {
            method: {name: relative_error(weight, chosen, method) for name, weight in weights.items()}
            for method in methods
        }
        measured.append(Noise(label, chosen, bits_per_weight(chosen), errors))
    return tuple(measured)


def relative_error(weight: torch.Tensor, chosen: Scheme, method: str) -> float:
    """Quantize a weight [N, K] by `method`; measure |W - Q|^2 / |W|^2 in float64 from the stored values."""
    exact = weight.double()
    stored = quantize_tensor(weight, chosen, method=method).dequantize().double()
    return float((stored - exact).square().sum() / exact.square().sum())


def pareto_front(noises: Iterable[Noise], method: str, distribution: str) -> tuple[Noise, ...]:
    """Return the schemes on the Pareto front of error and bits, sorted by bits rounded to three digits."""

    def rank(noise: Noise) -> tuple[float, float]:
        return round(noise.bits_per_weight, 3), noise.errors[method][distribution]

    front: list[Noise] = []
    for noise in sorted(noises, key=rank):
        if not front or rank(noise)[1] < rank(front[-1])[1]:
            front.append(noise)
    return tuple(front)

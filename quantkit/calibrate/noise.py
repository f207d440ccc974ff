"""The noise of schemes: what rounding costs weights drawn from two distributions, without a model.

The relative squared error of a layer predicts what a scheme costs a model well enough to rank schemes:
Malinovskii et al., "Pushing the Limits of Large Language Model Quantization via the Linearity Theorem"
(arXiv 2411.17525). Gaussian weights are what well-behaved or rotated layers look like, those of Student's t
distribution with 5 degrees of freedom are layers with outliers.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from quantkit.calibrate.methods import quantize_tensor
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, scheme

#: The weight [N, K] that bits are counted for.
NOMINAL_SHAPE = (4096, 4096)
#: The weight that is drawn, and the seed it is drawn with.
SAMPLE_SHAPE = (128, 4096)
SEED = 0
METHODS = ("rtn", "mse")
FREEDOM = 5

#: Schemes without a preset that are worth knowing, by label.
VARIANTS: dict[str, Scheme] = {
    "int4 g32 e4m3": scheme("int4", group_size=32, scale_dtype=torch.float8_e4m3fn),
    "int3 g32 e4m3": scheme("int3", group_size=32, scale_dtype=torch.float8_e4m3fn),
    "nf4 g32 e4m3": scheme("nf4", group_size=32, scale_dtype=torch.float8_e4m3fn),
    "int4 asym": scheme("int4", zero_point="integer"),
    "int4 asym-float": scheme("int4", zero_point="float"),
    "int3 asym-float": scheme("int3", zero_point="float"),
    "int2 asym-float": scheme("int2", zero_point="float"),
}

#: `report(done, total, label)`, called before each measurement.
Report = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Noise:
    """The relative squared errors of one scheme, |W - Q|^2 / |W|^2, by method and distribution."""

    label: str
    scheme: Scheme
    #: Of a weight of `NOMINAL_SHAPE`.
    bits_per_weight: float
    errors: Mapping[str, Mapping[str, float]]


def gaussian(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Unit normal weights, float32."""
    return torch.randn(shape, generator=generator)


def student_t(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Weights of Student's t distribution with `FREEDOM` degrees of freedom, float32."""
    normal = torch.randn(shape, generator=generator)
    return normal / torch.randn((FREEDOM, *shape), generator=generator).square_().mean(0).sqrt_()


#: What weights are drawn from, by name.
DISTRIBUTIONS: dict[str, Callable[[tuple[int, int], torch.Generator], torch.Tensor]] = {
    "gaussian": gaussian,
    "student_t": student_t,
}


def bits_per_weight(chosen: Scheme, shape: tuple[int, int] = NOMINAL_SHAPE) -> float:
    """All bits stored for a weight [N, K] over its weights: codes, padding, scales, zero-points and shape."""
    parts = chosen.storage_shapes(shape).values()
    return 8 * sum(dtype.itemsize * prod(size) for dtype, size in parts) / prod(shape)


def known_schemes() -> dict[str, Scheme]:
    """Every preset and variant by label; of presets with one scheme the last, which names its format."""
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
    """The noise of each scheme, in the order given, on one weight [N, K] of every distribution.

    Raises `FormatError` where a method does not take a scheme.
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
    """|W - Q|^2 / |W|^2 of a weight [N, K], in float64 from what is stored."""
    exact = weight.double()
    stored = quantize_tensor(weight, chosen, method=method).dequantize().double()
    return float((stored - exact).square().sum() / exact.square().sum())


def pareto_front(noises: Iterable[Noise], method: str, distribution: str) -> tuple[Noise, ...]:
    """Return the schemes that none of fewer or as many bits beats, by bits, which count as equal to three
    digits.
    """

    def rank(noise: Noise) -> tuple[float, float]:
        return round(noise.bits_per_weight, 3), noise.errors[method][distribution]

    front: list[Noise] = []
    for noise in sorted(noises, key=rank):
        if not front or rank(noise)[1] < rank(front[-1])[1]:
            front.append(noise)
    return tuple(front)

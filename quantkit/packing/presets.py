"""Names of formats, activations and schemes on the command line. Imports no torch, as `--help` shows them."""

from dataclasses import dataclass
from typing import Any, Literal

from quantkit import meant


@dataclass(frozen=True)
class Preset:
    """Format name of the command line: what it stands for.

    format        name of the number format
    group_size    default number of columns that share a scale; None for a whole row
    scale_dtype   name in `scale_types.SCALE_DTYPES`; None follows the weights, see `default_scale_dtype`
    planes        number of terms whose sum is a weight
    column_scale  True if every input feature has a factor too
    """

    format: str
    group_size: int | None
    scale_dtype: str | None = None
    planes: int = 1
    column_scale: bool = False


#: Default granularity per name. 8 bits need no groups; the others do (docs/accuracy.md). The block formats
#: are those of the OCP MX specification v1.0, and NVIDIA's NVFP4.
PRESETS: dict[str, Preset] = {
    "int8": Preset("int8", None),
    **{f"int{bits}": Preset(f"int{bits}", 128) for bits in (7, 6, 5, 4, 3, 2)},
    "ternary": Preset("ternary", 128),
    "binary": Preset("binary", 128),
    "binary-residual": Preset("binary", 128, planes=2),
    "binary-rank1": Preset("binary", None, column_scale=True),
    "fp8": Preset("fp8-e4m3", None),
    "fp8-e4m3": Preset("fp8-e4m3", None),
    "fp8-e5m2": Preset("fp8-e5m2", None),
    "fp6": Preset("fp6-e2m3", 128),
    "fp6-e2m3": Preset("fp6-e2m3", 128),
    "fp6-e3m2": Preset("fp6-e3m2", 128),
    "fp4": Preset("fp4-e2m1", 32),
    "nf4": Preset("nf4", 64),
    "book4": Preset("codebook4", 32, "e4m3"),
    "mxfp8": Preset("fp8-e4m3", 32, "e8m0"),
    "mxfp6": Preset("fp6-e2m3", 32, "e8m0"),
    "mxfp4": Preset("fp4-e2m1", 32, "e8m0"),
    "nvfp4": Preset("fp4-e2m1", 16, "e4m3"),
}


def preset_named(name: str) -> Preset | None:
    """Return the preset called `name`, else the first whose number format is called so; None without one."""
    return PRESETS.get(name) or next((one for one in PRESETS.values() if one.format == name), None)


#: Default format.
DEFAULT_FORMAT = "int4"

#: Zero-points, dtypes of scales and packings that a user may ask for.
ZERO_POINT_NAMES = ("none", "integer", "float")
SCALE_DTYPE_NAMES = ("float32", "float16", "bfloat16", "e4m3", "e8m0")
PACKING_NAMES = ("bits", "radix", "stream")

#: What `--formats` may say in place of formats.
ENGINE_MENU = "engine"
MENU_NAMES = (ENGINE_MENU, "fast", "all")


@dataclass(frozen=True)
class ActivationPreset:
    """Name of `--activations`: the fields of an `ActivationScheme`."""

    format: str
    group_size: int | None = None
    scale: Literal["float32", "e8m0", "e4m3"] = "float32"
    static: bool = False


#: Formats of KV caches for which checkpoints store scales.
KV_SCALES = ("fp8",)

#: How inputs may be rounded: one scale per token, per group of 128, per tensor, as the OCP MX specification
#: v1.0, or as NVIDIA's NVFP4.
ACTIVATIONS: dict[str, ActivationPreset] = {
    "int8": ActivationPreset("int8"),
    "int8-static": ActivationPreset("int8", static=True),
    "fp8": ActivationPreset("fp8-e4m3"),
    "fp8-g128": ActivationPreset("fp8-e4m3", 128),
    "fp8-static": ActivationPreset("fp8-e4m3", static=True),
    "mxfp8": ActivationPreset("fp8-e4m3", 32, "e8m0"),
    "mxfp4": ActivationPreset("fp4-e2m1", 32, "e8m0"),
    "nvfp4": ActivationPreset("fp4-e2m1", 16, "e4m3", static=True),
    "int4": ActivationPreset("int4"),
}


@dataclass(frozen=True)
class SchemePreset:
    """Name of `--scheme`: a format, its group size, zero-point and packing, and the activations."""

    format: str
    group_size: int | str | None = None
    zero_point: Literal["integer"] | None = None
    activations: str | None = None
    packing: Literal["bits", "stream"] = "bits"

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that differ from their defaults, as a `Choice` of a recipe has them."""
        return {name: value for name, value in vars(self).items() if value not in (None, "bits")}


#: Names of llm-compressor and compressed-tensors 0.20, whose INT8 is W8A8, and W8A8_STATIC, for which they
#: have none. Their FP8 has one scale per tensor of weights. Here it is one per channel, as for FP8_DYNAMIC,
#: which every method can choose.
SCHEMES: dict[str, SchemePreset] = {
    "FP8": SchemePreset("fp8", activations="fp8-static"),
    "FP8_DYNAMIC": SchemePreset("fp8", activations="fp8"),
    "FP8_BLOCK": SchemePreset("fp8", "128x128", activations="fp8-g128"),
    "W8A8": SchemePreset("int8", "channel", activations="int8"),
    "INT8": SchemePreset("int8", "channel", activations="int8"),
    "W8A8_STATIC": SchemePreset("int8", "channel", activations="int8-static"),
    "W4A8": SchemePreset("int4", 128, activations="int8"),
    "W4AFP8": SchemePreset("int4", 128, activations="fp8"),
    "W4A4": SchemePreset("int4", 128, activations="int4"),
    "MXFP8": SchemePreset("mxfp8", activations="mxfp8"),
    "MXFP4": SchemePreset("mxfp4", activations="mxfp4"),
    "NVFP4": SchemePreset("nvfp4", activations="nvfp4"),
    "W8A16": SchemePreset("int8", 128),
    "W4A16": SchemePreset("int4", 128),
    "W4A16_ASYM": SchemePreset("int4", 128, "integer"),
    "W3A16": SchemePreset("int3", 128, packing="stream"),
    "W2A16": SchemePreset("int2", 128),
    "MXFP8A16": SchemePreset("mxfp8"),
    "MXFP4A16": SchemePreset("mxfp4"),
    "NVFP4A16": SchemePreset("nvfp4"),
}
meant.FORMATS.give(PRESETS)
meant.SCHEMES.give(SCHEMES)
meant.ZERO_POINTS.give(ZERO_POINT_NAMES)

"""Format names of the command line. Imports no torch, as `--help` shows them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """Format name of the command line: number format, and the default group size and scale dtype.

    `scale_dtype` is a name of `schemes.SCALE_DTYPES`; None follows the dtype of the weights, see
    `default_scale_dtype`.
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

#: Default format.
DEFAULT_FORMAT = "int4"

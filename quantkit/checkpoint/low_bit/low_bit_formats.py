"""Table of the low-bit formats that quantkit reads.

A format is recognised by the name suffixes and dtypes of its tensors, after the name of a parameter or
module. If shapes are ambiguous, the config decides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from quantkit.checkpoint.low_bit.bitsandbytes import Bits4, Int8
from quantkit.checkpoint.low_bit.fp4 import Fp4
from quantkit.checkpoint.low_bit.gptq import Awq, Gptq, is_gptq
from quantkit.checkpoint.low_bit.mlx import Mlx
from quantkit.checkpoint.low_bit.pack_quantized import PackQuantized
from quantkit.checkpoint.low_bit.plain_codes import PlainCodes
from quantkit.checkpoint.low_bit.ternary import Ternary
from quantkit.checkpoint.low_bit.weight import FLOATS, LowBitWeight, Parts, Settings
from quantkit.checkpoint.tensors import Read

#: Suffix and dtypes of a part.
Part = tuple[str, tuple[str, ...]]

_FP8 = ("F8_E4M3", "F8_E5M2")
_POWERS = ("F8_E8M0", "U8")
_INTEGERS = ("I32", "I64")
#: Storage dtypes of bitsandbytes' 4-bit codes.
_STORAGE = ("U8", "I8", *FLOATS)


@dataclass(frozen=True)
class LowBitFormat:
    """Row: the names of a weight's parts, and their reader.

    name        name in notes
    codes       suffix and dtypes of the codes; the name without the suffix is the parameter's
    parts       further required parts, by role
    read        creates the weight from its parts; raises `CheckpointError` for inconsistent parts
    optional    parts that may be missing
    parameter   suffix of the parameter's name
    unused      suffixes of tensors of the same layer that dequantizing does not need
    fits        True if shapes are of this format; needed if names and dtypes match several
    """

    name: str
    codes: Part
    parts: Mapping[str, Part]
    read: Callable[[Parts, Settings, Read | None], LowBitWeight]
    optional: Mapping[str, Part] = field(default_factory=dict)
    parameter: str = ""
    unused: tuple[str, ...] = ()
    fits: Callable[[Parts], bool] = lambda parts: True


def _nf4(kind: str) -> LowBitFormat:
    return LowBitFormat(
        f"bitsandbytes {kind.upper()}",
        ("", _STORAGE),
        {"scale": (".absmax", ("F32", "U8")), "state": (f".quant_state.bitsandbytes__{kind}", ("U8",))},
        Bits4.of,
        {"nested_scale": (".nested_absmax", ("F32",)), "nested_map": (".nested_quant_map", ("F32",))},
        unused=(".quant_map",),
    )


def _scaled(codes: tuple[str, ...], suffix: str, scales: tuple[str, ...], name: str) -> LowBitFormat:
    return LowBitFormat(name, ("", codes), {"scale": (suffix, scales)}, PlainCodes.of)


#: The first row that fits a tensor is used.
FORMATS: tuple[LowBitFormat, ...] = (
    _scaled(_FP8, "_scale_inv", (*FLOATS, *_POWERS), "FP8 with block scales"),
    _scaled(_FP8, "_scale", FLOATS, "FP8"),
    _scaled(_FP8, "_scale", _POWERS, "MXFP8"),
    LowBitFormat(
        "FP8 with block scales",
        (".weight", _FP8),
        {"scale": (".scale", (*FLOATS, *_POWERS))},
        PlainCodes.of,
        parameter=".weight",
    ),
    LowBitFormat(
        "FP8",
        (".weight", _FP8),
        {"scale": (".qscale_weight", FLOATS)},
        PlainCodes.of,
        parameter=".weight",
    ),
    LowBitFormat(
        "MXFP4",
        (".weight", ("I8",)),
        {"scale": (".scale", ("F8_E8M0",))},
        Fp4.of,
        parameter=".weight",
    ),
    LowBitFormat("MXFP4", ("_blocks", ("U8",)), {"scale": ("_scales", ("U8",))}, Fp4.of_blocks),
    LowBitFormat(
        "compressed-tensors pack-quantized",
        ("_packed", ("I32",)),
        {"scale": ("_scale", FLOATS), "shape": ("_shape", _INTEGERS)},
        PackQuantized.of,
        {"zero": ("_zero_point", ("I32", "I8")), "groups": ("_g_idx", _INTEGERS)},
    ),
    LowBitFormat(
        "NVFP4",
        ("_packed", ("U8",)),
        {"scale": ("_scale", ("F8_E4M3",)), "global_scale": ("_global_scale", FLOATS)},
        Fp4.of,
    ),
    LowBitFormat("MXFP4", ("_packed", ("U8",)), {"scale": ("_scale", _POWERS)}, Fp4.of),
    LowBitFormat(
        "NVFP4",
        ("", ("U8",)),
        {"scale": ("_scale", ("F8_E4M3",)), "multiplier": ("_scale_2", FLOATS)},
        Fp4.of,
    ),
    LowBitFormat(
        "int8",
        ("", ("I8",)),
        {"scale": ("_scale", FLOATS)},
        PlainCodes.of,
        {"zero": ("_zero_point", ("I8",))},
    ),
    LowBitFormat(
        "GPTQ",
        (".qweight", ("I32",)),
        {"zero": (".qzeros", ("I32",)), "scale": (".scales", FLOATS)},
        Gptq.of,
        {"groups": (".g_idx", _INTEGERS)},
        parameter=".weight",
        fits=is_gptq,
    ),
    LowBitFormat(
        "AWQ",
        (".qweight", ("I32",)),
        {"zero": (".qzeros", ("I32",)), "scale": (".scales", FLOATS)},
        Awq.of,
        parameter=".weight",
    ),
    _nf4("nf4"),
    _nf4("fp4"),
    LowBitFormat(
        "bitsandbytes int8",
        (".weight", ("I8",)),
        {"scale": (".SCB", ("F32",))},
        Int8.of,
        parameter=".weight",
        unused=(".weight_format",),
    ),
    LowBitFormat("BitNet b1.58", ("", ("U8",)), {"scale": ("_scale", FLOATS)}, Ternary.of),
    LowBitFormat(
        "MLX",
        (".weight", ("U32",)),
        {"scale": (".scales", FLOATS), "bias": (".biases", FLOATS)},
        Mlx.of,
        parameter=".weight",
    ),
)

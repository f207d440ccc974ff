"""Table of the compressed-tensors checkpoints that other engines read.

The table is about files and holds on every device; an engine may lack a kernel for a device. The rows of vLLM
and SGLang are tested against their code (`tests/compat/engines.py`), those of transformers by loading.
`engine_support_activations.py` has the rows of matrices whose inputs are rounded.
"""

from collections.abc import Iterable

from quantkit.checkpoint.engine_support_activations import ACTIVATION_SUPPORT
from quantkit.checkpoint.engines import (
    ALL_KINDS,
    BLOCK,
    ENGINES,
    EXPERTS,
    FP8,
    GROUPS,
    INT,
    LINEARS,
    MXFP4,
    MXFP8,
    NVFP4,
    OTHER_BLOCKS,
    SGLANG,
    TRANSFORMERS,
    VLLM,
    WHOLE,
    Engine,
    Refusal,
    Stored,
    Support,
)

_GIVE_CHANNELS = "Choose scales per channel: -g channel."
_TENSOR = "integers with one scale per tensor"
_GIVE_GROUPS = "Choose scales per channel or group: -g channel or -g 128."
_FP8_GROUPS = "fp8 with scales per group"
_HF = ("CompressedTensorsHfQuantizer",)
_FP8_BLOCKS = "fp8 in other than whole blocks of 128x128"
_FP8_EXPERTS = "fp8 experts with 16-bit inputs"
#: `CompressedTensorsW4A4Mxfp4` and the classes beside it do not ask whether inputs are quantized.
_QUANTIZES_X = "on Blackwell GPUs quantizes x too, so accuracy is not what quantkit measures"

#: Widths of integers that vLLM has one kernel for, and SGLang none.
_OTHER_BITS = (2, 3, 5, 6, 7)
_HUMMING = "runs 2, 3, 5, 6 and 7 bits by Humming alone, on NVIDIA GPUs from Turing on, and was not run there"
_GIVE_INTS = "Give all linears int4 or int8."

#: The first row that fits decides. Storage without a row was not tested, and is not promised.
SUPPORT: tuple[Support, ...] = (
    *ACTIVATION_SUPPORT,
    Support(VLLM, INT, GROUPS, LINEARS, ("CompressedTensorsWNA16",), bits=_OTHER_BITS, caution=_HUMMING),
    Support(
        VLLM,
        INT,
        GROUPS,
        EXPERTS,
        bits=_OTHER_BITS,
        what="experts of 2, 3, 5, 6 or 7 bits",
        why="0.26.0 has experts of 4 and 8 bits only, and 0.32.0 takes Humming for them, which was not run",
        instead="Give the experts int4 or int8, such as --rule '*.experts.*=int8'.",
    ),
    Support(
        VLLM,
        INT,
        GROUPS,
        EXPERTS,
        bits=(8,),
        asymmetric=True,
        what="int8 experts with zero-points",
        instead="Give the experts int8 without zero-points, or int4.",
    ),
    Support(VLLM, INT, GROUPS, LINEARS, ("CompressedTensorsWNA16",)),
    Support(VLLM, INT, GROUPS, EXPERTS, ("CompressedTensorsWNA16MoEMethod",)),
    Support(VLLM, INT, ("tensor",), ALL_KINDS, what=_TENSOR, instead=_GIVE_GROUPS),
    Support(VLLM, FP8, WHOLE, LINEARS, ("CompressedTensorsW8A16Fp8",)),
    Support(VLLM, FP8, ("group",), LINEARS, what=_FP8_GROUPS, instead=_GIVE_CHANNELS),
    Support(VLLM, FP8, (BLOCK,), ("linear",), ("CompressedTensorsW8A16Fp8",)),
    Support(
        VLLM,
        FP8,
        (BLOCK,),
        ("lm_head",),
        what="an lm_head of fp8 in blocks",
        why="it wants a scale for every token",
        instead="Give it scales per channel, such as --lm-head fp8.",
    ),
    Support(VLLM, FP8, (OTHER_BLOCKS,), LINEARS, what=_FP8_BLOCKS, instead=_GIVE_CHANNELS),
    Support(
        VLLM,
        FP8,
        (*WHOLE, "group", BLOCK, OTHER_BLOCKS),
        EXPERTS,
        what=_FP8_EXPERTS,
        instead="Give the experts int8, mxfp8 or nvfp4, such as --rule '*.experts.*=int8'.",
    ),
    Support(VLLM, MXFP8, ("group",), LINEARS, ("CompressedTensorsW8A8Mxfp8",), caution=_QUANTIZES_X),
    Support(VLLM, MXFP8, ("group",), EXPERTS, ("CompressedTensorsW8A8Mxfp8MoEMethod",), caution=_QUANTIZES_X),
    Support(VLLM, MXFP4, ("group",), LINEARS, ("CompressedTensorsW4A4Mxfp4",), caution=_QUANTIZES_X),
    Support(VLLM, MXFP4, ("group",), EXPERTS, ("CompressedTensorsW4A4Mxfp4MoEMethod",), caution=_QUANTIZES_X),
    Support(VLLM, NVFP4, ("tensor_group",), LINEARS, ("CompressedTensorsW4A4Fp4",)),
    Support(VLLM, NVFP4, ("tensor_group",), EXPERTS, ("CompressedTensorsW4A4Nvfp4MoEMethod",)),
    Support(
        SGLANG,
        INT,
        GROUPS,
        ALL_KINDS,
        bits=_OTHER_BITS,
        what="integers of 2, 3, 5, 6 or 7 bits",
        instead=_GIVE_INTS,
    ),
    Support(SGLANG, INT, GROUPS, LINEARS, ("CompressedTensorsWNA16",)),
    Support(
        SGLANG,
        INT,
        GROUPS,
        EXPERTS,
        ("CompressedTensorsWNA16MoE",),
        what="integer experts beside linears of another format",
        instead=_GIVE_INTS,
        alone=True,
    ),
    Support(SGLANG, INT, ("tensor",), ALL_KINDS, what=_TENSOR, instead=_GIVE_GROUPS),
    Support(SGLANG, FP8, WHOLE, LINEARS, ("CompressedTensorsW8A16Fp8",)),
    Support(SGLANG, FP8, ("group",), LINEARS, what=_FP8_GROUPS, instead=_GIVE_CHANNELS),
    Support(SGLANG, FP8, (BLOCK, OTHER_BLOCKS), LINEARS, what="fp8 in blocks", instead=_GIVE_CHANNELS),
    Support(
        SGLANG,
        FP8,
        (*WHOLE, "group", BLOCK, OTHER_BLOCKS),
        EXPERTS,
        what=_FP8_EXPERTS,
        instead="Give all linears int8 or nvfp4.",
    ),
    Support(SGLANG, MXFP8, ("group",), ALL_KINDS, what="mxfp8", instead="Choose int8 or nvfp4."),
    Support(SGLANG, MXFP4, ("group",), LINEARS, what="mxfp4", instead="Choose int4 or nvfp4."),
    Support(
        SGLANG,
        MXFP4,
        ("group",),
        EXPERTS,
        what="mxfp4 experts",
        why="its class for them has other names for the codes",
        instead="Choose int4 or nvfp4.",
    ),
    Support(SGLANG, NVFP4, ("tensor_group",), LINEARS, ("CompressedTensorsW4A16Fp4",)),
    Support(SGLANG, NVFP4, ("tensor_group",), EXPERTS, ("CompressedTensorsW4A16Nvfp4MoE",)),
    Support(TRANSFORMERS, INT, (*GROUPS, "tensor"), ALL_KINDS, _HF),
    Support(
        TRANSFORMERS,
        FP8,
        (*WHOLE, "group", BLOCK, OTHER_BLOCKS),
        LINEARS,
        _HF,
    ),
    Support(TRANSFORMERS, FP8, WHOLE, EXPERTS, _HF),
    Support(
        TRANSFORMERS,
        FP8,
        ("group", BLOCK, OTHER_BLOCKS),
        EXPERTS,
        what="fp8 experts with scales per group or block",
        instead=_GIVE_CHANNELS,
    ),
    Support(TRANSFORMERS, MXFP8, ("group",), LINEARS, _HF),
    Support(
        TRANSFORMERS,
        MXFP8,
        ("group",),
        EXPERTS,
        what="mxfp8 experts without quantkit",
        instead="There give the experts int8 or mxfp4.",
    ),
    Support(TRANSFORMERS, MXFP4, ("group",), ALL_KINDS, _HF),
    Support(TRANSFORMERS, NVFP4, ("tensor_group",), LINEARS, _HF),
    Support(
        TRANSFORMERS,
        NVFP4,
        ("tensor_group",),
        EXPERTS,
        what="nvfp4 experts without quantkit",
        why="it drops their global scales, and says nothing",
        instead="There give the experts int4 or mxfp4.",
    ),
)


def support(engine: Engine, one: Stored) -> Support:
    """Look up how `engine` reads storage `one`; without a row, return one that refuses it as untried."""
    for row in SUPPORT:
        fits = (
            one.strategy in row.strategies
            and one.kind in row.kinds
            and one.bits in (row.bits or (one.bits,))
            and one.activations in row.activations
            and (not row.group_sizes or one.group_size in row.group_sizes)
            and not (row.asymmetric and one.symmetric)
        )
        if row.engine == engine and row.format == one.format and fits:
            return row
    inputs = f" and {one.activations} inputs" if one.activations else ""
    what = f"{one.kind} in {one.format} with scales per {one.strategy}{inputs}"
    return Support(
        engine,
        one.format,
        (one.strategy,),
        (one.kind,),
        what=what,
        why="it was not tried",
        instead="Choose another format or group size.",
    )


def readers(one: Stored) -> tuple[Engine, ...]:
    """Return the engines that have classes for matrices with storage `one`, in the order of `ENGINES`."""
    return tuple(engine for engine in ENGINES if support(engine, one).classes)


def refusals(layers: Iterable[Stored]) -> tuple[Refusal, ...]:
    """Return a `Refusal` for each reason why an engine cannot load some of `layers`.

    `layers` are all packed modules of a checkpoint: some formats are read only if every module has them.
    """
    layers = tuple(layers)
    mixed = len({one.format for one in layers}) > 1
    found: dict[tuple[str, str, str], dict[Engine, list[str]]] = {}
    for engine in ENGINES:
        for one in layers:
            row = support(engine, one)
            if not row.classes or (row.alone and mixed):
                reason = (row.what, row.why, row.instead)
                found.setdefault(reason, {}).setdefault(engine, []).append(one.module)
    return tuple(
        Refusal(tuple(engines), *reason, next(iter(engines.values()))[0], len(next(iter(engines.values()))))
        for reason, engines in found.items()
    )

"""Rows of the table of engines for matrices whose inputs are rounded too: see `engine_support.py`."""

from quantkit.checkpoint.engines import (
    ALL_KINDS,
    BLOCK,
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
    Support,
)

#: Rounded inputs, as `Stored.activations`.
_INT8_X, _FP8_X, _FP8_GROUPS_X = ("int8 token",), ("fp8-e4m3 token",), ("fp8-e4m3 g128",)
_MXFP8_X, _MXFP4_X = ("fp8-e4m3 g32 e8m0",), ("fp4-e2m1 g32 e8m0",)
_STATIC_INT8_X, _STATIC_FP8_X, _NVFP4_X = ("int8 tensor",), ("fp8-e4m3 tensor",), ("fp4-e2m1 g16 e4m3",)
INT8 = "int-quantized"
_GIVE_W8A8 = "Choose scales per channel: --scheme W8A8."
_GIVE_FP8 = "Choose --scheme FP8_DYNAMIC or FP8_BLOCK."
_ELSEWHERE = "on other than Blackwell GPUs leaves x as it is, so accuracy is not what quantkit measures"
_ROUNDS_OTHERWISE = "fp8 with inputs rounded per token and weights in blocks, or the other way round"
#: (engine, class of fp8 experts, of NVFP4 linears, of NVFP4 experts)
_CLASSES_OF: tuple[tuple[Engine, str, str, str], ...] = (
    (
        VLLM,
        "CompressedTensorsW8A8Fp8MoEMethod",
        "CompressedTensorsW4A4Fp4",
        "CompressedTensorsW4A4Nvfp4MoEMethod",
    ),
    (
        SGLANG,
        "CompressedTensorsW8A8Fp8MoE",
        "CompressedTensorsW4A16Fp4",
        "CompressedTensorsW4A16Nvfp4MoE",
    ),
)

#: (format, sizes of groups, inputs, class of linears, class of experts, caution): vLLM's classes of groups.
_VLLM_GROUPS = (
    (
        INT,
        (128,),
        _FP8_X,
        "CompressedTensorsW4A8Fp8",
        "CompressedTensorsW4A8Fp8MoEMethod",
        "runs on Hopper GPUs alone, and was not run there",
    ),
    (
        MXFP8,
        (),
        _MXFP8_X,
        "CompressedTensorsW8A8Mxfp8",
        "CompressedTensorsW8A8Mxfp8MoEMethod",
        _ELSEWHERE,
    ),
    (
        MXFP4,
        (),
        _MXFP4_X,
        "CompressedTensorsW4A4Mxfp4",
        "CompressedTensorsW4A4Mxfp4MoEMethod",
        _ELSEWHERE,
    ),
)

#: Matrices whose inputs are rounded too. Engines round as the strategy of the weights says, not the inputs'.
ACTIVATION_SUPPORT: tuple[Support, ...] = (
    *(
        row
        for engine, of_experts, _, _ in _CLASSES_OF
        for row in (
            Support(engine, FP8, WHOLE, LINEARS, ("CompressedTensorsW8A8Fp8",), activations=_FP8_X),
            Support(engine, FP8, ("channel",), EXPERTS, (of_experts,), activations=_FP8_X),
            Support(
                engine,
                FP8,
                ("tensor",),
                EXPERTS,
                what="fp8 experts with one scale per tensor and inputs rounded per token",
                instead="Choose --scheme FP8_DYNAMIC, or --activations fp8-static.",
                activations=_FP8_X,
            ),
            Support(
                engine, FP8, (BLOCK,), ("linear",), ("CompressedTensorsW8A8Fp8",), activations=_FP8_GROUPS_X
            ),
            Support(engine, FP8, (BLOCK,), EXPERTS, (of_experts,), activations=_FP8_GROUPS_X),
            Support(
                engine,
                FP8,
                (BLOCK,),
                ("lm_head",),
                what="an lm_head of fp8 in blocks",
                instead="Give it scales per channel, such as --lm-head fp8.",
                activations=_FP8_GROUPS_X,
            ),
            Support(
                engine,
                FP8,
                (OTHER_BLOCKS,),
                ALL_KINDS,
                what="fp8 in other than whole blocks of 128x128",
                instead="Choose --scheme FP8_DYNAMIC.",
                activations=_FP8_GROUPS_X,
            ),
            Support(
                engine,
                FP8,
                (*WHOLE, BLOCK, OTHER_BLOCKS),
                ALL_KINDS,
                what=_ROUNDS_OTHERWISE,
                why="it rounds inputs as its kernel for such weights does",
                instead=_GIVE_FP8,
                activations=(*_FP8_X, *_FP8_GROUPS_X),
            ),
            Support(
                engine,
                FP8,
                ("group",),
                ALL_KINDS,
                what="fp8 with scales per group",
                instead=_GIVE_FP8,
                activations=(*_FP8_X, *_FP8_GROUPS_X),
            ),
            Support(
                engine,
                INT8,
                WHOLE,
                LINEARS,
                ("CompressedTensorsW8A8Int8",),
                activations=(*_INT8_X, *_STATIC_INT8_X),
            ),
            Support(
                engine,
                INT8,
                WHOLE,
                EXPERTS,
                what="int8 experts with static input scales",
                instead="Give the experts fp8 with fp8 inputs.",
                activations=_STATIC_INT8_X,
            ),
        )
    ),
    *(
        row
        for engine, of_experts, of_nvfp4, of_nvfp4_experts in _CLASSES_OF
        for row in (
            Support(engine, FP8, WHOLE, LINEARS, ("CompressedTensorsW8A8Fp8",), activations=_STATIC_FP8_X),
            Support(engine, FP8, ("tensor",), EXPERTS, (of_experts,), activations=_STATIC_FP8_X),
            Support(
                engine,
                FP8,
                ("channel",),
                EXPERTS,
                what="fp8 experts with static input scales and a scale per channel",
                instead="Give the experts one scale per tensor: --rule '*.experts.*=fp8:tensor'.",
                activations=_STATIC_FP8_X,
            ),
            Support(
                engine,
                FP8,
                ("group", BLOCK, OTHER_BLOCKS),
                ALL_KINDS,
                what="fp8 in groups or blocks with static input scales",
                instead=_GIVE_FP8,
                activations=_STATIC_FP8_X,
            ),
            Support(
                engine,
                NVFP4,
                ("tensor_group",),
                LINEARS,
                (of_nvfp4,),
                caution=_ELSEWHERE,
                activations=_NVFP4_X,
            ),
            Support(
                engine,
                NVFP4,
                ("tensor_group",),
                EXPERTS,
                (of_nvfp4_experts,),
                caution=_ELSEWHERE,
                activations=_NVFP4_X,
            ),
        )
    ),
    Support(VLLM, INT8, WHOLE, EXPERTS, ("CompressedTensorsW8A8Int8MoEMethod",), activations=_INT8_X),
    Support(
        SGLANG,
        INT8,
        WHOLE,
        EXPERTS,
        what="int8 experts with int8 inputs on NVIDIA GPUs",
        instead="Give the experts fp8 with fp8 inputs.",
        activations=_INT8_X,
    ),
    *(
        Support(
            engine,
            INT8,
            ("group",),
            ALL_KINDS,
            what="int8 in groups with int8 inputs",
            instead=_GIVE_W8A8,
            activations=(*_INT8_X, *_STATIC_INT8_X),
        )
        for engine in (VLLM, SGLANG)
    ),
    *(
        Support(VLLM, form, ("group",), kinds, (name,), group_sizes=sizes, activations=x, caution=caution)
        for form, sizes, x, of_linears, of_experts, caution in _VLLM_GROUPS
        for kinds, name in ((LINEARS, of_linears), (EXPERTS, of_experts))
    ),
    Support(
        VLLM,
        INT,
        GROUPS,
        ALL_KINDS,
        what="int4 with fp8 inputs in other groups than of 128",
        instead="Choose groups of 128: --scheme W4AFP8.",
        activations=_FP8_X,
    ),
    Support(
        VLLM,
        INT,
        GROUPS,
        ALL_KINDS,
        what="int4 with int8 inputs",
        why="0.26.0 rounds them to fp8, and newer versions were not tried",
        instead="Choose --scheme W4AFP8 or W8A8.",
        activations=_INT8_X,
    ),
    Support(
        SGLANG,
        INT,
        GROUPS,
        ALL_KINDS,
        what="int4 with rounded inputs",
        instead="Choose --scheme FP8_DYNAMIC or W8A8.",
        activations=(*_INT8_X, *_FP8_X),
    ),
    *(
        Support(
            SGLANG,
            form,
            ("group",),
            ALL_KINDS,
            what=f"{form.partition('-')[0]} with rounded inputs",
            instead="Choose --scheme FP8_DYNAMIC or W8A8.",
            activations=x,
        )
        for form, x in ((MXFP8, _MXFP8_X), (MXFP4, _MXFP4_X))
    ),
    *(
        row
        for form, strategies, x in (
            (INT, GROUPS, (*_INT8_X, *_FP8_X)),
            (INT8, (*WHOLE, "group"), (*_INT8_X, *_STATIC_INT8_X)),
            (FP8, (*WHOLE, "group", BLOCK, OTHER_BLOCKS), (*_FP8_X, *_FP8_GROUPS_X, *_STATIC_FP8_X)),
            (NVFP4, ("tensor_group",), _NVFP4_X),
            (MXFP8, ("group",), _MXFP8_X),
            (MXFP4, ("group",), _MXFP4_X),
        )
        for row in (
            Support(
                TRANSFORMERS, form, strategies, LINEARS, ("CompressedTensorsHfQuantizer",), activations=x
            ),
            Support(
                TRANSFORMERS,
                form,
                strategies,
                EXPERTS,
                what="experts with rounded inputs without quantkit",
                why="it rounds no inputs of fused experts",
                instead="There load the model with quantkit.",
                activations=x,
            ),
        )
    ),
)

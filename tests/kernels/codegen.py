"""Compiles kernels for GPUs that need not be there: cases from stdin, facts about each to stdout, in lines.

A script, because Triton has to be imported without the interpreter in which the other tests run.
"""

import hashlib
import json
import math
import re
import subprocess
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.runtime.cache import get_cache_manager

from quantkit.kernels.gemm.decode import decode_launch, decode_tiles
from quantkit.kernels.gemm.dequantize import dequantize_launch
from quantkit.kernels.gemm.dequantize.dequantize_kernel import dequantize
from quantkit.kernels.gemm.gpu_limits import H200_PROCESSORS, HOPPER_SHARED
from quantkit.kernels.gemm.operands import GROUP_M, GemmSpec, Grouping, constants, table_bytes
from quantkit.kernels.gemm.portable.portable_gemm_kernel import portable_gemm
from quantkit.kernels.gemm.portable.portable_gemm_launch import (
    WAIT_PTX,
    fp16_weight_scale,
    portable_gemm_tile,
    shared_memory,
)
from quantkit.kernels.gemm.portable.portable_gemv_kernel import portable_gemv
from quantkit.kernels.gemm.portable.portable_gemv_launch import portable_gemv_tile, rows_of_x, unrolled
from quantkit.kernels.gemm.small_m import small_m_launch, small_m_tiles
from quantkit.kernels.gemm.wgmma.wgmma_kernel import wgmma_gemm
from quantkit.kernels.gemm.wgmma.wgmma_launch import MAX_STORE_VECTOR, TMA_ROWS, constants_of, wgmma_tile
from quantkit.kernels.gemm.wgmma.wgmma_tiles import COLUMNS, SCRATCH, WgmmaTile, copies, launch_bounds, stages
from quantkit.kernels.gemm.wgmma_8bit import wgmma_8bit_launch
from quantkit.kernels.gemm.wgmma_8bit.wgmma_8bit_launch import Wgmma8BitTile
from quantkit.kernels.layouts.fragment_layout import repack_constants
from quantkit.kernels.layouts.geometry import ROWS, geometry
from quantkit.kernels.layouts.repack_kernel import repack_codes
from quantkit.kernels.lora import add_lora
from quantkit.kernels.moe import expert_activation, router
from quantkit.kernels.moe.permute_kernels import (
    combine_experts,
    count_tokens,
    sort_few_tokens,
    sort_tokens_by_expert,
)
from quantkit.kernels.ops import activation, argmax, attention, divergence, embedding, kv_append, norm, rope
from quantkit.kernels.ops.quantize_x import CodeOrder
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.presets import SCHEMES
from quantkit.packing.schemes import scheme

N = K = 4096
#: Columns of a weight with long rows.
LONG = 14336
#: Bytes of shared memory that a program may have, where they are not as many as on Hopper and Blackwell.
SHARED = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 942: 64 << 10}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Case(NamedTuple):
    """A kernel, preset, GPU and M.

    The kernel is one of

    - portable-gemv, portable-gemm: with "experts" for several weights at once, the first with "long" for long
      rows; predicated: the first with loads of only those rows of x that are there; fp16 sums: the second
    - dequantize, repack; unpack e4m3: the first, of values without scales
    - count, sort, sort few, weigh: for routed tokens
    - small-m, decode, wgmma: with the numbers of a tile
    - bytes: the kernel for rounded inputs, with the numbers of a tile; its preset is a name of `--scheme`
    - attend: with what `build_attention` says; a dtype is the preset, and M the features of a head
    """

    kernel: str
    name: str
    capability: int
    m: int


class Source(NamedTuple):
    function: Any
    constants: dict[str, Any]
    warps: int
    stages: int
    bound: int | None


#: How experts of DeepSeek-V3 are chosen.
GROUPED = router.Routing(8, factor=2.5, groups=8, kept=4)
#: Parts of quantized inputs, which no other operand shares a name with.
CODES = {"codes": "*fp8e4nv", "scales": "*fp32", "sums": "*fp32"}
ROUNDED = ActivationScheme("fp8-e4m3")
#: The same in the terms of `fused-gemv`.
ROUNDS = decode_tiles.Rounding(448.0, 3, 2.0**-6, float(torch.finfo(torch.bfloat16).max), True)
#: Tensors of `ops` that are int64.
INTEGERS = ("cache_length", "table", "ids", "positions", "partial", "tokens", "index")
#: Kernels that work on pairs, which know no weights, with two slots of 8 experts.
PAIRS = {
    "count": (count_tokens, {"PART": 512}),
    "sort": (sort_tokens_by_expert, {"PART": 2048, "ROWS": 8}),
    "sort few": (sort_few_tokens, {"PADDED": 128, "ROWS": 8}),
    "weigh": (combine_experts, {"TOP_K": 2, "BLOCK": 1024, "bias": None}),
}


#: The activation of gpt-oss.
EXPERTS_SWIGLU = (("KIND", "swiglu"), ("LIMIT", 7.0), ("ALPHA", 1.702), ("INTERLEAVED", True))


def source(case: Case, row: Any, dtype: torch.dtype) -> Source:
    """The kernel as it is launched, in the tile of the rules."""
    amd = case.capability == 942
    features = frozenset(() if amd else ("ptx", "wgmma") if case.capability == 90 else ("ptx",))
    k = LONG if case.kernel.endswith("long") else K
    shape, known = geometry(N, k, row, dtype), constants(N, k, row, dtype, not amd)
    if case.kernel in ("dequantize", "unpack e4m3"):
        tile = {"C": max(128 // shape.span, 1), "W": dequantize_launch.WARPS}
        scaled = {"SCALED": case.kernel == "dequantize"}
        return Source(dequantize, {**known, **tile, **scaled}, dequantize_launch.WARPS, 3, None)
    if case.kernel in PAIRS:
        kernel, sizes = PAIRS[case.kernel]
        names = kernel.arg_names
        known = {"EXPERTS": 8, "BUCKETS": 16, "PDL": 90 <= case.capability < 942, **sizes}
        return Source(kernel, {name: known[name] for name in names if name in known}, 4, 3, None)
    if case.kernel == "repack":
        check = any(map(math.isnan, row.format.values))
        return Source(repack_codes, repack_constants(row.format, shape, row.format.bits, check), 4, 3, None)
    experts = case.kernel.endswith("experts")
    known = dict(known, HAS_BIAS=not experts, MATRICES=2 if experts else 1, TOP_K=2 if experts else 1)
    if not experts:
        known |= {"order": None, "expert_blocks": None}
    if case.kernel.startswith("portable-gemv") or case.kernel == "predicated":
        tile = replace(portable_gemv_tile(shape, case.m), predicate_x=case.kernel == "predicated")
        known |= {"W": tile.warps, "DOTS": tile.columns // shape.dot, "RT": tile.row_tiles}
        known |= {"BM": rows_of_x(case.m, features), "PREFETCH": tile.prefetch}
        known |= {
            "UNROLL": unrolled(tile, shape),
            "PREDICATE_X": tile.predicate_x,
            "ONE_ACCUMULATOR": tile.one_accumulator,
            "PDL": 90 <= case.capability < 942,
        }
        return Source(portable_gemv, known, tile.warps, 1, None)
    assert case.kernel in ("portable-gemm", "portable-gemm experts", "fp16 sums"), case
    tile = portable_gemm_tile(shape, case.m, SHARED.get(case.capability, HOPPER_SHARED), features=features)
    if experts:
        tile = replace(tile, split_k=1)
    half = fp16_weight_scale(N, K, row) if case.kernel == "fp16 sums" else None
    known |= {
        "RT": tile.row_tiles,
        "BM": tile.block_m,
        "ACCUMULATORS": tile.accumulators,
        "SPLIT_K": tile.split_k,
    }
    known |= {"SPLIT_LAST_WAVE": tile.occupancy > 0, "TILES_OF_BLOCK": 1}
    known |= {
        "SYNC_MMA": not amd and tile.accumulators == 1,
        "WAIT_PTX": WAIT_PTX if tile.accumulators > 1 else None,
    }
    known |= {
        "STAGES": tile.stages,
        "GROUP_M": GROUP_M,
        "FP16_SCALE": half,
        "PDL": 90 <= case.capability < 942,
    }
    return Source(portable_gemm, known, tile.warps, tile.stages, shared_memory(tile, shape, features))


def build_ops(case: Case, target: GPUTarget) -> tuple[Any, Source]:
    """What is between the linears of a model with hidden states, or heads, of `m` numbers, in bfloat16."""
    features = frozenset({"overlap"} if 90 <= case.capability < 942 else ())
    launch = {
        "embed": lambda: embedding._embed_launch(1, 1, features),
        "norm": lambda: norm._norm_launch(
            1, 1, case.m, True, (1e-5, "llama"), False, None, None, torch.bfloat16, features
        ),
        "rounded norm": lambda: norm._norm_launch(
            1, 1, case.m, True, (1e-5, "llama"), False, ROUNDED, None, torch.bfloat16, features
        ),
        "norm codes": lambda: norm._norm_launch(
            *(1, 1, case.m, True, (1e-5, "llama"), False, ROUNDED, CodeOrder(64, True)),
            torch.bfloat16,
            features,
        ),
        "gate codes": lambda: activation._gate_codes_launch(
            1, 1, case.m, case.m, "silu", ROUNDED, CodeOrder(64, True), features
        ),
        "gate": lambda: activation._gate_launch(1, 1, "silu", features),
        "activate": lambda: expert_activation._launch(
            *(1, case.m, 32, EXPERTS_SWIGLU, (torch.bfloat16, torch.int64, torch.bfloat16)), features
        ),
        "cos_sin": lambda: rope._cos_sin_launch(1, case.m // 2, 1.0, features),
        "rotate": lambda: rope._rotate_launch(1, 8, case.m // 2, features),
        "rotate_append": lambda: rope._rotate_append_launch(1, 8, 2, case.m // 2, case.m, None, features),
        "norm_rotate_append": lambda: rope._rotate_append_launch(
            1, 8, 2, case.m // 2, case.m, (1e-6, "llama"), features
        ),
        "append": lambda: kv_append._append_launch(1, 2, case.m, case.m, features),
        "fill": lambda: kv_append._fill_launch(1, 2, 1, case.m * 2 // kv_append.WORD),
        "argmax partial": lambda: argmax._launches(1, 64, features)[0],
        "argmax combine": lambda: argmax._launches(1, 64, features)[1],
        "divergence": lambda: divergence._launch(1, 128256),
        "shrink": lambda: add_lora._launches(1, 4096, case.m, 16, 2.0, features)[0],
        "expand": lambda: add_lora._launches(1, case.m, 4096, 16, 2.0, features)[1],
        "small_linear": lambda: router._small_linear_launch(1, 128, case.m, None, features),
        "norm_linear": lambda: router._small_linear_launch(1, 128, case.m, (1e-6, "llama"), features),
        "route": lambda: router._route_launch(1, 4, case.m, router.Routing(8), False, None, features),
        "route pairs": lambda: router._route_launch(1, 4, case.m, router.Routing(8), False, 8, features),
        "route groups": lambda: router._route_launch(1, 1, case.m, GROUPED, True, 8, features),
    }[case.name]()
    names, options = launch._kernel.arg_names, launch._options
    known = {name: options[name] for name in names if name in options}
    # Weights lie together.
    known |= {name: 1 for name in ("w_i", "w_n") if name in names}
    # Strides and sizes have an underscore, or are in capitals.
    tensors = [
        name
        for name in names
        if name not in known and name.islower() and ("_" not in name or name.endswith("_weight"))
    ]
    types = {
        **dict.fromkeys(names, "i32"),
        **dict.fromkeys(tensors, "*bf16"),
        **{name: kind for name, kind in CODES.items() if name in names},
        **{name: "*i64" for name in INTEGERS if name in names},
        **{name: "*i32" for name in ("order", "expert_blocks") if name in names},
        **({"frequencies": "*fp32"} if "frequencies" in names else {}),
        **({"logits": "*fp32"} if known.get("SIGMOID") else {}),
        # A LoRA of PEFT.
        **({name: "*fp32" for name in ("a", "b", "u") if name in names} if "u" in names else {}),
        **dict.fromkeys(known, "constexpr"),
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in known}
    code = ASTSource(launch._kernel, types, known, aligned)
    others = {name: value for name, value in options.items() if name not in names}
    found = Source(launch._kernel, known, options.get("num_warps", 4), 1, None)
    return triton.compile(code, target=target, options=others), found


def build_attention(case: Case, target: GPUTarget) -> tuple[Any, Source]:
    """Attention as it is launched, of eight heads that share keys in bfloat16, and sixteen in float16.

    After the number of a plan is how many programs share the keys of a head, and what kind of mask there is;
    with "once", of a program's keys all are attended to at a time, with "new" the token is rotated and kept,
    with "norms" norms of its heads are taken first, and with "ready" no kernel still writes what is read
    first.
    """
    since = {80: {"ptx"}, 90: {"ptx", "overlap"}, 942: set[str]()}
    features = frozenset(since[max(known for known in since if known <= case.capability)])
    _, number, chunks, *words = case.kernel.split()
    mask = next((word for word in words if word in ("bool", "float")), "")
    heads = int(min(attention.PLANS[int(number)].most, 8) * H200_PROCESSORS)
    sizes = attention._Sizes(heads, 8 if case.name == "bfloat16" else 16, case.m, case.m, 2)
    plan, _ = attention._plan(sizes, 1 << 12, H200_PROCESSORS)
    once, new, ready = (word in words for word in ("once", "new", "ready"))
    norms = (1e-6, "llama") if "norms" in words else None
    launch, _ = attention._launches(sizes, plan, int(chunks), 1.0, mask, once, new, norms, ready, features)
    names, options = launch._kernel.arg_names, launch._options
    known = {name: options[name] for name in names if name in options}
    types = {
        **dict.fromkeys(names, "i32"),
        **dict.fromkeys(
            ("q", "k", "v", "out", "new_k", "new_v", "cos", "sin", "q_weight", "k_weight"),
            "*bf16" if case.name == "bfloat16" else "*fp16",
        ),
        **dict.fromkeys(("sums", "stats"), "*fp32"),
        "mask": "*u8" if mask == "bool" else "*bf16",
        "cache_length": "*i64",
        **dict.fromkeys(known, "constexpr"),
    }
    # Pointers, and strides of q, k and v.
    whole = [name for name in names if types[name][0] == "*" or re.match("[qkvc]_|new_._", name)]
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in whole}
    code = ASTSource(launch._kernel, types, known, aligned)
    others = {name: value for name, value in options.items() if name not in names}
    found = Source(launch._kernel, known, options["num_warps"], 1, None)
    return triton.compile(code, target=target, options=others), found


def build_wgmma(case: Case, target: GPUTarget) -> tuple[Any, Source]:
    """The kernel for many rows of x, in the tile that its name has the numbers of, or that of the rules.

    With "by" and a number rows of y are multiples of that, else of 8. After the preset there may be another
    group size, and a kind of zero-point.
    """
    preset, *more = case.name.split()
    row, dtype = scheme(preset), torch.bfloat16
    if more:
        row = replace(row, group_size=int(more[0]), zero_point=more[1])
    shape = geometry(N, K, row, dtype)
    asked, _, even = case.kernel.partition(" by ")
    numbers = map(int, asked.split()[1:])
    tile = WgmmaTile(*numbers)
    if asked == "wgmma":
        tile = wgmma_tile(shape, case.m, zeros=row.has_zero_point)
    known = constants_of(N, K, row, dtype, tile)
    known = {name: value for name, value in known.items() if name in wgmma_gemm.arg_names}
    blocks = stages(tile, table_bytes(row, dtype, copies(tile)))
    known |= {
        "HAS_BIAS": True,
        "BN": tile.block_n,
        "BM": tile.block_m,
        "PREFETCH": tile.prefetch,
        "STAGES": blocks,
    }
    known |= {
        "MMA_REGISTERS": launch_bounds(tile).mma_registers,
        "GROUP_M": GROUP_M,
        "BLOCK_K": tile.block_k,
        "STORE_VECTOR": int(even or MAX_STORE_VECTOR),
        "PDL": True,
    }
    types = {
        **dict.fromkeys(wgmma_gemm.arg_names, "*bf16"),
        "x": f"tensordesc<bf16[{min(tile.block_m, TMA_ROWS)},{COLUMNS}],{NVMMASharedLayout(128, 16, 2)!r}>",
        "codes": "*i16",
        "scale": "*i8" if shape.scale_kind else "*bf16",
        **dict.fromkeys(("factor", "lut", "sums"), "*fp32"),
        **dict.fromkeys(
            ("M", "N", "WHOLE_TILES", "STEPS_PER_PROGRAM", "TILE_STRIDE", "SPANS", "BLOCKS"), "i32"
        ),
        "TOKEN": "i64",
        **dict.fromkeys(known, "constexpr"),
    }
    names = wgmma_gemm.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*"}
    code = GluonASTSource(
        wgmma_gemm,
        {name: types[name] for name in names},
        {(names.index(name),): known[name] for name in known},
        aligned,
    )
    bound = 2 * blocks * tile.block_m * COLUMNS + SCRATCH
    found = Source(wgmma_gemm, known, 4, blocks, bound)
    options = {"num_warps": 4, "launch_pdl": True, "maxnreg": launch_bounds(tile).max_registers}
    return triton.compile(code, target=target, options=options), found


def build_bytes(case: Case, target: GPUTarget) -> tuple[Any, Source]:
    """The kernel that multiplies bytes, as it is launched in the tile that its name has the numbers of."""
    preset, dtype = SCHEMES[case.name], torch.bfloat16
    row = scheme(preset.format, group_size=preset.group_size, activations=preset.activations).for_columns(K)
    assert row.activations is not None
    block_m, blocks, promote = map(int, case.kernel.split()[1:])
    tile = Wgmma8BitTile(block_m, blocks, promote=bool(promote))
    shape = geometry(N, K, row.of_weights, dtype)
    spec = GemmSpec(case.m, N, K, row.of_weights, dtype, True)
    launches = wgmma_8bit_launch._launches(
        spec, row.activations, tile, frozenset({"overlap"}), H200_PROCESSORS
    )
    kernel, options = launches.kernel._kernel, launches.kernel._options
    names = kernel.arg_names
    known = {name: options[name] for name in names if name in options}
    matrix, cube = launches.plain_layouts
    box = f"[{min(block_m, TMA_ROWS)},{COLUMNS}]"
    x_type = f"tensordesc<{'i8' if known['DTYPE'].is_int() else 'fp8e4nv'}{box},{launches.x_layout!r}>"
    has_block_values = known["X_GROUPS"] or known["OFFSET"] != 0.0
    types = {
        **dict.fromkeys(names, "*bf16"),
        "x": x_type,
        "codes": f"tensordesc<i32[8,{shape.bits // 2},{COLUMNS}],{cube!r}>",
        "scales": f"tensordesc<i32[8,8],{matrix!r}>" if known["GROUPS"] > 1 else x_type,
        "block_values": f"tensordesc<fp32[1,{block_m}],{matrix!r}>" if has_block_values else x_type,
        **dict.fromkeys(("x_scale", "sums"), "*fp32"),
        **dict.fromkeys(("M", "N", "WHOLE_TILES", "STEPS_PER_PROGRAM", "TILE_STRIDE", "STEPS"), "i32"),
        "TOKEN": "i64",
        **dict.fromkeys(known, "constexpr"),
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*"}
    code = GluonASTSource(
        kernel,
        {name: types[name] for name in names},
        {(names.index(name),): known[name] for name in known},
        aligned,
    )
    found = Source(kernel, known, 4, known["STAGES"], None)
    return triton.compile(code, target=target, options={"num_warps": 4, "launch_pdl": True}), found


def build_small_m(case: Case, target: GPUTarget) -> tuple[Any, Source]:
    """The kernel for some rows of x, in the tile that its name has the numbers of, with a bias.

    With "long", it is for a weight with long rows, with "gate" y is gated, with "end" a norm ended. With
    "begin", it is the kernel that adds up parts and begins a norm. With "experts", it is for pairs, and the
    two matrices of their experts; with "chained", not for the first time.
    """
    row, dtype = scheme(case.name), torch.bfloat16
    _, *numbers = case.kernel.split()
    gate = "silu" if "gate" in numbers else ""
    k = LONG if "long" in numbers else K
    shape = geometry(N, k, row, dtype)
    *sizes, wgmma = map(int, [one for one in numbers if one.isdecimal()])
    tile = small_m_tiles.SmallMTile(*sizes, bool(wgmma))
    features = frozenset({"ptx", "gluon", *(["overlap"] if case.capability >= 90 else [])})
    ends, begins = 1e-5 if "end" in numbers else None, 0.0 if "begin" in numbers else None
    grouping = Grouping(2, 8, case.m, 2, 2, "chained" in numbers) if "experts" in numbers else None
    n, has_bias = (N, True) if grouping is None else (2 * N, False)
    launches = small_m_launch._launches(
        GemmSpec(case.m, n, k, row, dtype, has_bias),
        tile,
        features,
        H200_PROCESSORS,
        HOPPER_SHARED,
        gate,
        begins,
        ends,
        grouping,
    )
    launch = launches[0 if begins is None else 1]
    names, options = launch._kernel.arg_names, launch._options
    known = {name: options[name] for name in names if name in options}
    types = {
        **dict.fromkeys(names, "*bf16"),
        "codes": "*i16",
        "scale": "*i8" if shape.scale_kind else "*bf16",
        **dict.fromkeys(("factor", "lut", "sums", "squares"), "*fp32"),
        **dict.fromkeys(("order", "expert_blocks"), "*i32"),
        **dict.fromkeys(("M", "N", "ROW_TILES"), "i32"),
        **dict.fromkeys(known, "constexpr"),
    }
    types = {name: types[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*"}
    language = GluonASTSource if begins is None else ASTSource
    code = language(launch._kernel, types, {(names.index(name),): known[name] for name in known}, aligned)
    others = {name: value for name, value in options.items() if name not in names}
    norm_bytes = 0 if ends is None else small_m_tiles.rstd_bytes(case.m)
    room = small_m_tiles.plan_shared_memory(
        tile, shape, case.m, row, HOPPER_SHARED, table_bytes(row, dtype), norm_bytes
    )
    bound = room.nbytes + norm_bytes
    found = Source(launch._kernel, known, options["num_warps"], 1, bound)
    return triton.compile(code, target=target, options=others), found


def build_decode(case: Case, target: GPUTarget) -> tuple[Any, Source]:
    """The kernel for a few rows of x, in the tile that its name has the numbers of, with a bias.

    With "long", it is for a weight with long rows, with "small" for one of few; with "norm" x is the norm of
    a sum, with "begin" or "end" they begin or end a norm, with "gate" y is gated, with "round" x is rounded.
    """
    row, dtype = scheme(case.name), torch.bfloat16
    _, *numbers = case.kernel.split()
    gate = "silu" if "gate" in numbers else ""
    # Rows for several turns; of a weight with long rows for one.
    n, k = (N, LONG) if "long" in numbers else (N if "small" in numbers else 7 * N, K)
    named = {"norm": "whole", "begin": "begin", "end": "end"}
    part = next((part for name, part in named.items() if name in numbers), None)
    norm = part and decode_tiles.Norm(part, True, 1e-5, True, 0.0)
    *sizes, integers = map(int, [one for one in numbers if one.isdecimal()])
    tile = decode_tiles.DecodeTile(*sizes, bool(integers))
    features = frozenset({"ptx", "gluon", *(["overlap"] if case.capability >= 90 else [])})
    grouping = Grouping(2, 8, case.m, 2, 2, "chained" in numbers) if "experts" in numbers else None
    launch, _ = decode_launch._launch(
        GemmSpec(case.m, n, k, row, dtype, grouping is None),
        tile,
        features,
        H200_PROCESSORS,
        norm,
        gate,
        grouping,
        ROUNDS if "round" in numbers else None,
    )
    names, options = launch._kernel.arg_names, dict(launch._options)
    known = options.pop("S")
    types = {
        **dict.fromkeys(names, "*bf16"),
        "codes": "*i16",
        "scale": "*i8" if known.scale_kind else "*bf16",
        **dict.fromkeys(("factor", "lut", "squares"), "*fp32"),
        **dict.fromkeys(("M", "N", "ROW_TILES", "REMAINDER"), "i32"),
        **dict.fromkeys(("order", "expert_blocks"), "*i32" if grouping else "constexpr"),
        "S": "constexpr",
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*"}
    constant = {(names.index("S"),): known}
    if grouping is None:
        constant |= {(names.index(name),): options.pop(name) for name in ("order", "expert_blocks")}
    code = GluonASTSource(launch._kernel, types, constant, aligned)
    # What is around sums for other threads, of four bytes each.
    found = Source(launch._kernel, {}, tile.warps, 1, known.declared_bytes)
    return triton.compile(code, target=target, options=options), found


def build(case: Case) -> tuple[Any, Source]:
    amd = case.capability == 942
    target = GPUTarget("hip", "gfx942", 64) if amd else GPUTarget("cuda", case.capability, 32)
    if case.kernel.startswith("attend"):
        return build_attention(case, target)
    if case.kernel == "ops":
        return build_ops(case, target)
    if case.kernel.startswith("bytes"):
        return build_bytes(case, target)
    if case.kernel.startswith("wgmma"):
        return build_wgmma(case, target)
    if case.kernel.startswith("small-m"):
        return build_small_m(case, target)
    if case.kernel.startswith("decode"):
        return build_decode(case, target)
    dtype = torch.float16 if case.kernel == "fp16 sums" else torch.bfloat16
    row = scheme(case.name)
    found = source(case, row, dtype)
    floats = "*fp16" if case.kernel == "fp16 sums" else "*bf16"
    types = {
        **dict.fromkeys(("codes", "repacked"), "*i16"),
        **dict.fromkeys(("stored", "reserved"), "*u8"),
        "found": "*i32",
        "scale": "*i8" if found.constants.get("SCALE") else "*bf16",
        "zero": "*bf16",
        **dict.fromkeys(("factor", "lut", "sums"), "*fp32"),
        **dict.fromkeys(("x", "bias", "y", "out", "weights"), floats),
        **({"out": "*fp8e4nv"} if case.kernel == "unpack e4m3" else {}),
        **dict.fromkeys(("order", "expert_blocks", "counts"), "*i32"),
        "index": "*i64",
        **dict.fromkeys(("M", "P", "PARTS", "first", "N", "K", "STRIDE", "SPANS", "UNSPLIT"), "i32"),
        **dict.fromkeys(found.constants, "constexpr"),
    }
    names = found.function.arg_names
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name][0] == "*"}
    code = ASTSource(found.function, {name: types[name] for name in names}, found.constants, aligned)
    options = {"num_warps": found.warps, "num_stages": found.stages}
    if found.constants.get("PDL"):
        options["launch_pdl"] = True
    return triton.compile(code, target=target, options=options), found


def facts(case: Case) -> dict[str, Any]:
    built, found = build(case)
    assembly = built.asm["amdgcn" if case.capability == 942 else "ptx"]

    def count(pattern: str) -> int:
        return len(re.findall(pattern, assembly))

    about = {
        "loads": sorted(set(re.findall(r"ld\.global\.v4|cp\.async\.cg", assembly))),
        "products": count(r"mma\.sync|mma_async|tcgen05\.mma|v_mfma"),
        "in_flight": [int(w) for w in re.findall(r"wgmma\.wait_group\S* (\d+)", assembly)],
        # Products of the tensor cores after each wait for those of the other chain.
        "chains": [
            len(re.findall("mma_async", part))
            for part in re.split(re.escape(WAIT_PTX.split("\n", maxsplit=1)[0].strip("{;")), assembly)
        ],
        "shuffles": count(r"shfl\.sync"),
        "stores": count(r"st\.shared"),
        "written": sorted(set(re.findall(r"st\.global\.(\S+)", assembly))),
        "approximations": count(r"(?:cos|sin)\.approx|v_(?:cos|sin)_f32"),
        "sums": sorted(set(re.findall(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.(\w+)\.f16\.f16", assembly))),
        "halves": count(r"wgmma.mma_async\S*\.f16\.f16\.f16"),
        # Whether the table of values is more than a parameter.
        "looks_up": built.asm.get("ttir", "").count("%lut") > 1,
        "shared": built.metadata.shared,
        "limit": SHARED.get(case.capability, HOPPER_SHARED),
        "bound": found.bound,
    }
    return about | (
        amd_code(assembly, found) if case.capability == 942 else machine_code(built.asm["cubin"], found)
    )


def per_weight(instructions: int, lanes: int, found: Source) -> float:
    """Of a kernel without loops over the columns: the instructions of a program of 16 rows, per weight."""
    return instructions * found.warps * lanes / (ROWS * found.constants.get("RT", 1) * K)


def amd_code(assembly: str, found: Source) -> dict[str, Any]:
    """What LLVM made of it, for warps of 64."""
    lines = re.findall(r"^\t((?:[vs]|ds|global|buffer|scratch)_\w+)", assembly, re.MULTILINE)

    def count(*kinds: str) -> int:
        return sum(line.startswith(kinds) for line in lines)

    return {
        "spills": count("scratch"),
        "global_loads": count("global_load", "buffer_load"),
        "shared_writes": count("ds_write"),
        "shared_reads": count("ds_read"),
        "per_weight": per_weight(len(lines), 64, found),
    }


def disassembled(cubin: bytes) -> str:
    """Its instructions, kept where Triton keeps kernels: many are compiled in the time that this takes."""
    kept = get_cache_manager(hashlib.sha256(cubin).hexdigest())
    if (path := kept.get_file("sass")) is not None:
        return Path(path).read_text()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / "cuobjdump", "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kept.put(text, "sass", binary=False)
    return text


def machine_code(cubin: bytes, found: Source) -> dict[str, Any]:
    """What ptxas made of it."""
    text = disassembled(cubin)
    # "/*0a10*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"
    lines = re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", text, re.MULTILINE)
    lines = [line for line in lines if not line.startswith("NOP")]
    products = [line for line in lines if re.match("[HQI]GMMA", line)]
    # "LDGSTS.E.BYPASS.128" copies 16 bytes to shared memory, one without a width 4.
    copies = [line.split()[0].split(".") for line in lines if line.startswith("LDGSTS")]
    widths = [16 if "128" in copy else 8 if "64" in copy else 4 for copy in copies]
    return {
        # Registers that went to memory or back.
        "spills": sum(line.startswith(("STL", "LDL")) for line in lines),
        **loops_of_products(text),
        "registers": 1 + max(map(int, re.findall(r"\bR(\d+)", " ".join(lines)))),
        "wgmma": len(products),
        # Where they are not left in flight, each has two of its own.
        "waits": sum(line.startswith("WARPGROUP") for line in lines),
        # "HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24": operand A is R4, not in shared memory as B is.
        "wgmma_registers": sum(
            re.match(r"[HQI]GMMA\S* R\d+, R\d+, gdesc", line) is not None for line in products
        ),
        "overwritten": overwritten(lines),
        "wide_copies": sum(width for width in widths if width == 16) / sum(widths) if widths else None,
        "wide_loads": sum(re.match(r"LDG\.\S*128", line) is not None for line in lines),
        "per_weight": per_weight(len(lines), 32, found),
    }


def overwritten(lines: list[str]) -> list[str]:
    """Instructions that write a register of operand A, of four, between a product and the wait for it."""
    read: set[int] = set()
    found = []
    for line in lines:
        if (product := re.match(r"[HQI]GMMA\S* R\d+, R(\d+), gdesc", line)) is not None:
            read |= {int(product[1]) + i for i in range(4)}
        elif line.startswith("WARPGROUP.DEPBAR"):
            read = set()
        elif (written := re.match(r"([A-Z]\S*) (?:P\d+, )?R(\d+)\b", line)) is not None:
            # "LDS.128 R4, [R2]" writes four, "CS2R R6, SRZ" and "IMAD.WIDE R6, ..." two.
            kind, first = written[1], int(written[2])
            wide = 4 if ".128" in kind else 2 if re.search(r"\.64|CS2R|WIDE", kind) else 1
            if read & set(range(first, first + wide)):
                found.append(line)
    return found


def loops_of_products(text: str) -> dict[str, int]:
    """How many loops have products and no other such loop in them, the instructions of the longest, and the
    registers spilled there.
    """
    lines = [
        (int(address, 16), line)
        for address, line in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", text)
    ]
    # "BRA 0x2170"
    jumps = [(int(line.split("0x")[1], 16), at) for at, line in lines if re.match("BRA.* 0x", line)]
    loops: set[tuple[int, int]] = set()
    for product in (at for at, line in lines if re.match("[HQI]GMMA|HMMA|IMMA", line)):
        around = [(first, last) for first, last in jumps if first <= product <= last]
        loops |= {min(around, key=lambda loop: loop[1] - loop[0])} if around else set()
    spills = [at for at, line in lines if line.startswith(("STL", "LDL"))]
    return {
        "loops": len(loops),
        "looped": max((sum(first <= at <= last for at, _ in lines) for first, last in loops), default=0),
        "spills_in_loops": sum(first <= at <= last for at in spills for first, last in loops),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        try:
            answer = facts(Case(*json.loads(line)))
        except Exception:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), flush=True)

"""What Triton and ptxas make of the fused kernels, without a GPU: compiled for targets and read."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile
from quantkit.kernels.gemm.wgmma.wgmma_tiles import RESERVED
from quantkit.kernels.ops.attention import PLANS
from quantkit.packing.presets import PRESETS

pytest.importorskip("triton")

Case = tuple[str, str, int, int]
Compiled = Callable[[list[Case]], dict[Case, dict[str, Any]]]

#: Presets that the kernels take, each scheme once: fp8 is fp8-e4m3.
NAMES = [
    name
    for index, (name, row) in enumerate(PRESETS.items())
    if row.planes == 1 and row not in list(PRESETS.values())[:index]
]
#: Instructions per weight of the kernel for few rows on sm_90, a few hundredths above those of Triton 3.6.
INSTRUCTIONS = {
    "int8": 2.87,
    "int7": 2.73,
    "int6": 2.66,
    "int5": 2.62,
    "int4": 2.5,
    "int3": 2.38,
    "int2": 2.21,
    "ternary": 2.21,
    "binary": 2.16,
    "binary-rank1": 1.97,
    "fp8": 3.37,
    "fp8-e5m2": 3.37,
    "fp6": 3.58,
    "fp6-e3m2": 3.77,
    "fp4": 3.38,
    "nf4": 3.69,
    "book4": 4.53,
    "mxfp8": 3.56,
    "mxfp6": 3.6,
    "mxfp4": 3.02,
    "nvfp4": 3.15,
}
#: The same in the loop over row tiles of `fused-gemv`, with products of integers, and of floats.
STREAMED = {
    "int8": 0.7,
    "int7": 1.9,
    "int6": 1.45,
    "int5": 1.95,
    "int4": 1.05,
    "int3": 1.7,
    "int2": 1.0,
    "ternary": 1.55,
    "binary": 1.5,
}
STREAMED_FLOATS = {
    "int8": 2.25,
    "int4": 2.1,
    "fp8": 2.9,
    "fp6": 3.3,
    "nf4": 2.15,
    "book4": 2.75,
    "mxfp6": 3.4,
    "mxfp4": 2.67,
    "nvfp4": 2.95,
}
#: Of presets that are decoded alike one each.
KINDS = {"int8", "int7", "int4", "int3", "binary", "fp6", "book4", "mxfp4", "nvfp4"}
#: Fewer, where one compilation takes seconds.
SOME_KINDS = {"int7", "nf4", "mxfp4"}
#: Presets whose values are fetched from lanes of the warp, and without PTX from memory.
TABLES = {"book4", "nf4"}
#: The compute capability by which the scripts call AMD's MI300.
AMD = 942
#: The same of the kernel for many rows, at the begin and the end of a tile.
HOPPER_SPILLS = 20
#: The same of `fused-wgmma-8bit` for two blocks of columns with sums of x: faster than one block (H200, int4,
#: 28672 x 4096, M = 4096: 1008 against 1094 us).
BYTES_SPILLS = 40
#: Formats and tiles of `fused-wgmma` with many columns at a time that stand for the others.
SOME_TURNS = (("int4", "64 128 1"), ("int3", "32 128 2"), ("fp6", "128 128 1"))


def slow_unless(kept: bool) -> list[pytest.MarkDecorator]:
    """Marks of what only `make codegen` compiles, as others stand for it."""
    return [] if kept else [pytest.mark.slow]


@pytest.fixture(scope="module")
def compiled() -> Iterator[Compiled]:
    """Facts about each (kernel, preset, capability, M), from one `codegen.py`: it takes seconds to start."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("codegen.py")]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def facts(case: Case) -> dict[str, Any]:
            print(json.dumps(case), file=questions, flush=True)
            answer = answers.readline()
            assert answer, f"{case}: the process ended with {process.wait()}"
            found: dict[str, Any] = json.loads(answer)
            assert "error" not in found, f"{case}: {found['error']}"
            return found

        yield lambda cases: {case: facts(case) for case in cases}
    assert process.returncode == 0


def assert_few_rows_stay_in_registers(case: Case, found: dict[str, Any]) -> None:
    assert found["products"] > 0, case
    assert found["loads"] == ["ld.global.v4"], case
    # The four warps' sums meet once; everything else stays where it was loaded.
    assert found["stores"] <= 16, (case, found)
    assert found["shuffles"] <= 16 or case[1] in TABLES, (case, found)


def assert_tiles_wait_for_products(case: Case, found: dict[str, Any]) -> None:
    """Triton would leave products in flight that read registers which the next weights are decoded into."""
    assert found["products"] > 0, case
    assert found["shared"] <= found["bound"], (case, found)
    if len(found["chains"]) > 1:
        # Products are done in order: with seven or fewer in flight, none of a chain's own.
        assert found["chains"] == [0, 8, 8], (case, found)
    else:
        assert found["in_flight"] and set(found["in_flight"]) == {0}, (case, found)


def assert_portable_kernels_fit(case: Case, found: dict[str, Any]) -> None:
    """Without PTX values are computed too, products are those of tensor cores, and shared memory suffices."""
    kernel, name, _, _ = case
    assert found["looks_up"] == (name in TABLES), case
    if kernel == "dequantize" or name not in TABLES:
        assert found["shared"] <= found["limit"], (case, found)
        assert (found["products"] > 0) == (kernel != "dequantize"), case
        assert found["spills"] == 0, (case, found)
        if kernel.startswith("portable-gemv"):
            # What is loaded passes through it once, in the order of these tensor cores; not decoded weights.
            assert found["shared"] <= 16 << 10, (case, found)
            assert found["shared_reads"] <= found["global_loads"] * 1.3, (case, found)
        assert not kernel.startswith("portable-gemm") or found["shared"] <= found["bound"], (case, found)


def test_every_preset_has_a_ceiling() -> None:
    assert sorted(INSTRUCTIONS) == sorted(NAMES)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=slow_unless(name in {"int4", "int7", "nf4", "nvfp4"})) for name in NAMES],
)
def test_on_hopper_kernels_are_what_makes_them_fast(compiled: Compiled, name: str) -> None:
    """In both nothing spills. Few rows: few instructions. Tiles: weights are decoded into operand A."""
    gemv, gemm = ("portable-gemv", name, 90, 1), ("portable-gemm", name, 90, 64)
    of = compiled([gemv, gemm])
    case, found = gemv, of[gemv]
    assert_few_rows_stay_in_registers(case, found)
    assert found["spills"] == 0, (case, found)
    assert found["per_weight"] <= INSTRUCTIONS[name], (case, found)
    case, found = gemm, of[gemm]
    assert_tiles_wait_for_products(case, found)
    assert found["spills"] == 0, (case, found)
    assert found["wgmma"] > 0 and found["wgmma_registers"] == found["wgmma"], (case, found)
    # Codes and x are copied 16 bytes at a time, past the registers; some scales 4 or 8.
    assert found["wide_loads"] == 0, (case, found)
    assert found["wide_copies"] >= 0.95, (case, found)


def test_few_rows_of_x_are_loaded_where_there_are_any(compiled: Compiled) -> None:
    for case, found in compiled([("predicated", name, 90, 1) for name in ("int4", "int8", "nf4")]).items():
        assert_few_rows_stay_in_registers(case, found)
        assert found["spills"] == 0, (case, found)


def test_on_ampere_few_rows_stay_in_registers(compiled: Compiled) -> None:
    for case, found in compiled(
        [("portable-gemv", name, 80, 1) for name in ("int4", "int7", "nvfp4", "fp8")]
    ).items():
        assert_few_rows_stay_in_registers(case, found)


def test_tiles_of_any_size_wait_for_a_product_before_they_decode_the_next(compiled: Compiled) -> None:
    cases: list[Case] = [
        ("portable-gemm", "int4", 90, 128),
        ("portable-gemm", "int3", 90, 32),
        ("portable-gemm", "nvfp4", 90, 128),
    ]
    cases += [("portable-gemm", "int8", 90, 1024), ("portable-gemm", "int3", 90, 128)]
    chains = {}
    for case, found in compiled(cases).items():
        assert_tiles_wait_for_products(case, found)
        chains[case[1:]] = len(found["chains"]) - 1
    assert chains == {
        ("int4", 90, 128): 2,
        ("int3", 90, 32): 0,
        ("nvfp4", 90, 128): 2,
        ("int8", 90, 1024): 2,
        ("int3", 90, 128): 0,
    }


def test_other_targets_compile(compiled: Compiled) -> None:
    """Blackwell and a consumer GPU."""
    cases: list[Case] = [
        (kernel, name, 100, 8) for name in ("int4", "nvfp4") for kernel in ("portable-gemv", "portable-gemm")
    ]
    for case, found in compiled([*cases, ("portable-gemm", "int7", 89, 128)]).items():
        assert found["products"] > 0, case
        assert found["shared"] <= found["limit"], case


def test_the_layout_builder_compiles(compiled: Compiled) -> None:
    for case, found in compiled([("repack", "int5", 80, 1), ("repack", "fp4", AMD, 1)]).items():
        assert found["spills"] == 0, case


def test_e4m3_codes_are_unpacked_in_whole_words(compiled: Compiled) -> None:
    for case, found in compiled([("unpack e4m3", "fp8", 90, 1)]).items():
        assert found["spills"] == 0 and found["products"] == 0, (case, found)
        assert found["written"] == ["v4.b32"], (case, found)


def test_kernels_without_ptx_compute_values_in_the_memory_there_is(compiled: Compiled) -> None:
    cases: list[Case] = [
        ("portable-gemv", "int4", AMD, 1),
        ("portable-gemv", "mxfp4", AMD, 1),
        ("dequantize", "nf4", AMD, 1),
    ]
    # Steps of 256 columns take the most shared memory.
    cases += [
        ("portable-gemm", "fp6", AMD, 64),
        ("portable-gemm", "binary", AMD, 128),
        ("dequantize", "nvfp4", AMD, 1),
    ]
    for case, found in compiled(cases).items():
        assert_portable_kernels_fit(case, found)


def test_with_experts_kernels_are_as_fast_as_with_one_weight(compiled: Compiled) -> None:
    """They read the same bytes in the same way; a tenth of an instruction per weight finds them."""
    names = ("int4", "nvfp4")
    cases: list[Case] = [("portable-gemv experts", name, 90, 1) for name in names]
    cases += [("portable-gemm experts", name, 90, m) for name in names for m in (32, 128)]
    for case, found in compiled(cases).items():
        assert found["spills"] == 0, (case, found)
        if case[0] == "portable-gemv experts":
            assert_few_rows_stay_in_registers(case, found)
            assert found["per_weight"] <= INSTRUCTIONS[case[1]] + 0.1, (case, found)
            continue
        assert_tiles_wait_for_products(case, found)
        assert found["wgmma"] > 0 and found["wgmma_registers"] == found["wgmma"], (case, found)
        assert found["wide_loads"] == 0 and found["wide_copies"] >= 0.95, (case, found)


def test_kernels_with_experts_compile_for_other_targets(compiled: Compiled) -> None:
    cases: list[Case] = [
        (kernel, "int4", capability, m)
        for capability in (80, AMD)
        for kernel, m in (
            ("portable-gemv experts", 1),
            ("portable-gemm experts", 64),
            ("count", 1),
            ("sort", 1),
            ("sort few", 1),
            ("weigh", 1),
        )
    ]
    for case, found in compiled(
        [*cases, ("sort", "int4", 90, 1), ("portable-gemv experts", "nvfp4", AMD, 1)]
    ).items():
        kernel, _, capability, _ = case
        assert found["shared"] <= found["limit"], (case, found)
        if not kernel.endswith("experts"):
            assert found["spills"] == 0, (case, found)
        elif capability == AMD:
            assert_portable_kernels_fit(case, found)
        else:
            assert found["products"] > 0, (case, found)
            if kernel == "portable-gemv experts":
                assert_few_rows_stay_in_registers(case, found)


@pytest.mark.parametrize(
    ("name", "capability", "m"), [("int7", 90, 8), pytest.param("int5", 89, 1, marks=pytest.mark.slow)]
)
def test_long_rows_of_wide_codes_leave_registers_to_load_ahead(
    compiled: Compiled, name: str, capability: int, m: int
) -> None:
    for case, found in compiled([("portable-gemv long", name, capability, m)]).items():
        assert found["spills"] == 0, (case, found)
        assert_few_rows_stay_in_registers(case, found)


def attention(plan: int, capability: int, kind: int, heads: int) -> Case:
    """Of a plan: a GPU, programs and mask, and eight heads that share keys or sixteen with their features."""
    kernel = " ".join(["attend", str(plan), *[("1", "bool"), ("4", ""), ("4", "bool"), ("1", "float")][kind]])
    name, features = [("bfloat16", 128), ("float16", 128), ("bfloat16", 256), ("float16", 256)][heads]
    return kernel.strip(), name, (80, 89, 90, AMD)[capability], features


def assert_attention_fits(found: dict[Case, dict[str, Any]]) -> None:
    for case, about in found.items():
        assert about["shared"] <= about["limit"], (case, about)
        assert about["spills"] == 0, (case, about)


@pytest.mark.parametrize("plan", range(len(PLANS)))
def test_attention_fits_memory_and_registers(compiled: Compiled, plan: int) -> None:
    """Among all plans are all pairs of what there is: a plane over the field of four, whose sums are `^`."""
    twice = (0, 2, 3, 1)
    assert_attention_fits(
        compiled([attention(plan, gpu, (plan ^ gpu) % 4, (plan ^ twice[gpu]) % 4) for gpu in range(4)])
    )


@pytest.mark.slow
@pytest.mark.parametrize("plan", range(len(PLANS)))
def test_attention_of_each_plan_fits_memory_and_registers(compiled: Compiled, plan: int) -> None:
    """All pairs of the rest for each plan."""
    assert_attention_fits(
        compiled([attention(plan, gpu, (gpu + heads) % 4, heads) for gpu in range(4) for heads in range(4)])
    )


#: Of attention: a plan and programs, words of `build_attention`, and a GPU.
ROTATING = [
    (plan, kind, gpu)
    for plan in ("0 12", "1 4", "2 1")
    for kind in (
        *("bool new", "bool once new ready", "float new ready", "once"),
        *("bool once new norms ready", "float new norms ready"),
    )
    for gpu in (80, 89, 90, AMD)
]
#: Of each kind one, of each plan two, of each GPU one or two.
SOME_ROTATING = {ROTATING[24 * (kind % 3) + 4 * kind + kind % 4] for kind in range(6)}


@pytest.mark.parametrize(
    ("plan", "kind", "gpu"),
    [pytest.param(*one, marks=slow_unless(one in SOME_ROTATING)) for one in ROTATING],
)
def test_attention_that_rotates_stays_in_registers(
    compiled: Compiled, plan: str, kind: str, gpu: int
) -> None:
    assert_rotation_stays(compiled([(f"attend {plan} {kind}", "bfloat16", gpu, 128)]))


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["0 12", "1 4", "2 1"])
def test_attention_of_sixteen_heads_stays_in_registers(compiled: Compiled, plan: str) -> None:
    """In float16, for which it does not rotate."""
    kinds, gpus = ("bool once", "float once"), (80, 89, 90, AMD)
    cases: list[Case] = [(f"attend {plan} {kind}", "float16", gpu, 128) for kind in kinds for gpu in gpus]
    assert_rotation_stays(compiled(cases))


def assert_rotation_stays(found: dict[Case, dict[str, Any]]) -> None:
    assert_attention_fits(found)
    for (kernel, _, gpu, _), about in found.items():
        # Those of largest scores and of sums, and of squares: no operand is laid out anew.
        shuffles = 19 if "norms" in kernel else 14
        assert gpu == AMD or (about["shuffles"] <= shuffles and about["stores"] <= 20), (kernel, gpu, about)


# Of 768 rows of x, tiles of 192 rows of the weight give each processor one.
@pytest.mark.parametrize(
    ("name", "m"),
    [
        *(pytest.param(name, 4096, marks=slow_unless(name in SOME_KINDS)) for name in NAMES),
        *(
            pytest.param(name, 768, marks=slow_unless(name == "int4"))
            for name in ("int8", "int4", "fp6", "nf4")
        ),
    ],
)
def test_hopper_leaves_products_in_flight(compiled: Compiled, name: str, m: int) -> None:
    """Of 8 products of 16 columns and 64 rows each, from weights in registers."""
    (found,) = compiled([("wgmma", name, 90, m)]).values()
    assert found["shared"] <= found["bound"] and found["shared"] <= found["limit"], found
    assert found["spills"] <= HOPPER_SPILLS and found["spills_in_loops"] == 0, found
    # Two or three groups of warps, two units; of some formats a unit has 256 columns, in two turns.
    groups = 3 if m == 768 else 2
    turns = 2 if name.startswith(("int7", "int5", "int3", "binary")) else 1
    assert found["loops"] == groups, found
    assert found["wgmma"] == found["wgmma_registers"] == groups * 2 * turns * 8, found
    # One to begin with each block of x, and one for its end.
    assert found["waits"] == groups * 2 * turns * 2, found
    # Values come from shared memory; the one shuffle is Triton's, to know which group a warp is in.
    assert found["shuffles"] <= 1, found


@pytest.mark.parametrize(
    ("name", "m"),
    [
        pytest.param(
            name, m, marks=slow_unless((name, m) in (("int7 16 integer", 4096), ("int8 32 float", 128)))
        )
        for name in ("int7 16 integer", "int5 32 integer", "int8 32 float", "int4 16 integer")
        for m in (32, 64, 128, 4096)
    ],
)
def test_hopper_has_registers_for_many_scales_and_zero_points(compiled: Compiled, name: str, m: int) -> None:
    (found,) = compiled([("wgmma", name, 90, m)]).values()
    assert found["spills_in_loops"] <= 8, found


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        pytest.param(name, tile, marks=slow_unless((name, tile) in SOME_TURNS))
        for name in ("int8", "int7", "int4", "int3", "fp8", "fp6", "nf4", "nvfp4")
        for tile in ("16 128 2", "32 128 2", "64 128 1", "128 128 1")
    ],
)
def test_hopper_multiplies_with_many_columns_at_a_time(compiled: Compiled, name: str, tile: str) -> None:
    """Of 16 products, which wait for both blocks of x and once for all."""
    (found,) = compiled([(f"wgmma {tile} 0 256", name, 90, 0)]).values()
    assert found["shared"] <= found["bound"] and found["shared"] <= found["limit"], found
    assert found["spills"] == 0, found
    assert found["wgmma"] == found["wgmma_registers"] == 2 * 2 * 16, found
    assert found["waits"] == 2 * 2 * 3, found


@pytest.mark.parametrize(
    ("even", "written"),
    [
        (8, "v4.b32"),
        (4, "v2.b32"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "b32"), (1, "b16"))),
    ],
)
def test_hopper_writes_as_much_at_once_as_rows_of_y_allow(
    compiled: Compiled, even: int, written: str
) -> None:
    """Sums that are left take 16 bytes at a time, and words that say so 8."""
    (found,) = compiled([(f"wgmma 64 128 1 by {even}", "int4", 90, 0)]).values()
    assert found["written"] == sorted({"v4.b32", "b64", written}), found


@pytest.mark.parametrize("name", ["mxfp4", pytest.param("nf4", marks=pytest.mark.slow)])
def test_three_groups_of_few_rows_of_x_stay_in_registers(compiled: Compiled, name: str) -> None:
    (found,) = compiled([("wgmma 64 192 2", name, 90, 64)]).values()
    assert found["shared"] <= found["bound"] and found["loops"] == 3, found
    assert found["spills"] <= HOPPER_SPILLS and found["spills_in_loops"] == 0, found
    assert found["wgmma"] == found["wgmma_registers"] == 3 * 2 * 8, found


@pytest.mark.parametrize(
    ("name", "m"),
    [
        pytest.param(name, m, marks=slow_unless(i % 2 == at))
        for i, name in enumerate(("int8", "int4", "fp6", "mxfp4", "nf4"))
        for at, m in enumerate((16, 32))
    ],
)
def test_two_programs_of_few_rows_of_x_fit_a_multiprocessor(compiled: Compiled, name: str, m: int) -> None:
    (found,) = compiled([(f"wgmma {m} 128 1", name, 90, 0)]).values()
    assert 2 * (found["shared"] + RESERVED) <= found["limit"] + RESERVED, found
    # Of three groups launched with 80 registers a thread, the others have 104 and 24.
    assert found["registers"] <= 3 * 80 - 104 - 24, found
    assert found["spills"] <= HOPPER_SPILLS and found["spills_in_loops"] == 0, found
    assert found["wgmma"] == found["wgmma_registers"] == 2 * 2 * 8, found


#: Products, ends of norms, experts and gates, for an old GPU and the one that it is for.
SHARED_X: list[Case] = [
    *(("small-m 8 8 2 0", name, 90, 16) for name in ("int4", "mxfp4", "nf4")),
    ("small-m 16 1 2 0", "int4", 80, 16),
    ("small-m end 8 8 2 0", "fp6", 90, 16),
    ("small-m experts 8 1 2 0", "nvfp4", 90, 8),
    ("small-m experts chained 16 4 2 0 long", "int4", 90, 8),
    ("small-m gate end 16 1 2 0", "int4", 90, 16),
    ("small-m experts gate 16 1 2 0", "int4", 90, 8),
]
#: The same in other formats and for other GPUs.
MORE_SHARED_X: list[Case] = [
    *(("small-m 8 8 2 0", name, 90, 16) for name in ("int8", "nvfp4", "fp6")),
    *(("small-m 16 1 2 0", "int4", capability, 16) for capability in (89, 90, 100)),
    *(("small-m 16 1 4 0", "int4", 90, 8), ("small-m 16 1 2 0", "mxfp6", 90, 16)),
    *(("small-m end 8 8 2 0", "nf4", 90, 16), ("small-m 16 1 2 0", "nvfp4", 90, 8)),
    *(("small-m experts 8 1 2 0", name, 90, 8) for name in ("int8", "nf4")),
    ("small-m experts 16 1 2 0", "int4", 80, 8),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SHARED_X, id="of each kind"),
        pytest.param(MORE_SHARED_X, id="more", marks=pytest.mark.slow),
    ],
)
def test_warps_that_share_x_keep_all_else_in_registers(compiled: Compiled, cases: list[Case]) -> None:
    for case, found in compiled(cases).items():
        name = case[1]
        assert found["products"] > 0 and found["spills"] == 0, (case, found)
        # Operand A is decoded, and operand B loaded, where products want them; but for the 2048 times 16
        # bytes of a table of values.
        table = 8 if name in TABLES else 0
        ends, gates = "end" in case[0], "gate" in case[0]
        assert found["stores"] == table or ends or gates, (case, found)
        assert found["shuffles"] == 0 or ends, (case, found)
        assert found["registers"] <= 128 and found["shared"] == found["bound"], (case, found)
        # x is copied 16 bytes at a time.
        assert found["wide_copies"] == 1.0, (case, found)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=slow_unless(name in ("int4", "nf4")))
        for name in ("int8", "int6", "int4", "int3", "nvfp4", "mxfp4", "nf4", "fp6", "fp8", "binary")
    ],
)
def test_four_warps_multiply_what_they_have_in_registers(compiled: Compiled, name: str) -> None:
    tiles = [("8 8 2", 16), ("8 8 2", 32), ("16 1 2", 16), ("16 8 2 long", 16)]
    cases: list[Case] = [(f"small-m {tile} 1".replace("long 1", "1 long"), name, 90, m) for tile, m in tiles]
    for case, found in compiled([*cases, ("small-m gate end 16 1 2 1", name, 90, 16)]).items():
        assert found["wgmma"] == found["wgmma_registers"] == found["products"] > 0, (case, found)
        assert found["spills"] == 0 and found["registers"] <= 128, (case, found)
        assert found["shared"] == found["bound"] and found["wide_copies"] == 1.0, (case, found)


@pytest.mark.parametrize(
    "capability", [80, 90, *(pytest.param(at, marks=pytest.mark.slow) for at in (89, 100))]
)
def test_parts_are_added_up_in_few_registers(compiled: Compiled, capability: int) -> None:
    (found,) = compiled([("small-m begin 8 8 2 0", "int4", capability, 16)]).values()
    assert found["spills"] == 0 and found["shared"] <= 1024 and found["registers"] <= 64, found


@pytest.mark.parametrize(
    ("name", "integers"),
    [
        *(pytest.param(name, 1, marks=slow_unless(name in {"int8", *KINDS})) for name in STREAMED),
        *(
            pytest.param(name, 0, marks=slow_unless(name in ("int4", "nf4", "nvfp4")))
            for name in STREAMED_FLOATS
        ),
    ],
)
def test_streamed_codes_stay_in_registers(compiled: Compiled, name: str, integers: int) -> None:
    ahead = {"int8": 2, "int7": 1, "int6": 2, "nf4": 2, "book4": 2}.get(name, 4)
    (found,) = compiled([(f"decode 8 2 1 {ahead} {integers}", name, 90, 1)]).values()
    assert found["products"] > 0 and found["loops"] == 1, found
    # Of nf4 an address is put away before the loop, and fetched after it.
    assert found["spills"] <= 2 * (name == "nf4") and found["spills_in_loops"] == 0, found
    assert found["registers"] <= 128 and found["shared"] == found["bound"], found
    # Floats of x are copied 16 bytes at a time. What a table is multiplied with goes through registers.
    through = integers or name in TABLES
    assert found["wide_copies"] == (None if through else 1.0), found
    # Those of sums, and of x where words of it are exchanged; none of values.
    assert integers or found["shuffles"] <= (12 if name in TABLES else 8), found
    # A warp has 16 rows of 512 columns in each turn.
    most = (STREAMED if integers else STREAMED_FLOATS)[name]
    assert found["looped"] <= most * 16 * 512 / 32, (found["looped"] * 32 / (16 * 512), most)


@pytest.mark.parametrize(
    "kernel",
    [
        "decode long 16 1 2 3 1",
        "decode norm 8 2 1 4 1",
        "decode norm long 16 1 2 3 1",
        "decode norm gate 8 2 1 4 1",
        "decode end gate 8 2 1 2 1",
        "decode begin long 16 1 2 3 1",
        "decode round long 16 1 2 3 1",
        "decode round gate 8 2 1 4 1",
    ],
)
def test_turns_norms_and_gates_stay_in_registers(compiled: Compiled, kernel: str) -> None:
    (found,) = compiled([(kernel, "int4", 90, 1)]).values()
    assert found["products"] > 0 and found["spills"] == 0 and found["registers"] <= 128, found
    # One turn is no loop.
    assert found["loops"] == ("long" not in kernel), found


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("nvfp4", "decode 16 2 1 1 0"),
        ("fp8", "decode norm gate 16 2 1 1 0"),
        ("mxfp4", "decode 8 3 1 2 0"),
        *(
            pytest.param(name, kernel, marks=pytest.mark.slow)
            for name in ("nvfp4", "mxfp8", "mxfp6", "mxfp4", "fp8")
            for kernel in (
                "decode norm gate 16 2 1 1 0",
                "decode begin 16 2 1 1 0",
                "decode end gate 16 2 1 1 0",
            )
        ),
    ],
)
def test_more_warps_have_registers(compiled: Compiled, name: str, kernel: str) -> None:
    """Those of the rules, of which two programs are 32 warps, and a few of the table of the H200."""
    tile = DecodeTile(*[int(number) for number in kernel.split() if number.isdecimal()][:4])
    (found,) = compiled([(kernel, name, 90, 2)]).values()
    assert found["products"] > 0 and found["spills"] == 0, found
    assert found["registers"] <= decode_launch.thread_registers(tile) < 128, found


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("int7", "16 1 2 1 0"),
        ("int6", "16 1 1 1 0"),
        ("fp6", "16 1 1 1 0"),
        *(
            pytest.param(name, tile, marks=pytest.mark.slow)
            for name in ("int8", "int5", "int4", "fp4", "mxfp8", "nvfp4")
            for tile in ("16 1 2 1 0", "16 1 1 2 0")
        ),
    ],
)
def test_streams_past_sixteen_rows_stay_in_registers(compiled: Compiled, name: str, tile: str) -> None:
    (found,) = compiled([(f"decode small {tile}", name, 90, 16)]).values()
    assert found["products"] > 0 and found["spills"] == 0 and found["registers"] <= 128, found
    assert found["shared"] == found["bound"] <= found["limit"], found
    assert found["wide_copies"] == 1.0, found


@pytest.mark.parametrize(
    ("name", "kernel", "most"),
    [
        # Faster than one row tile at a time, for which no register is put away.
        ("int4", "decode experts gate 4 4 2 1 1", 2),
        ("nvfp4", "decode experts chained 4 4 2 1 0", 0),
        ("int4", "decode experts chained 16 1 2 1 1", 0),
        *(
            pytest.param(name, f"decode experts {words} 8 2 2 1 {integers}", most, marks=pytest.mark.slow)
            for name, integers, most in (("int8", 1, 3), ("int4", 1, 0), ("mxfp4", 0, 0), ("fp6", 0, 0))
            for words in ("gate", "chained")
        ),
    ],
)
def test_streams_of_experts_hardly_spill(compiled: Compiled, name: str, kernel: str, most: int) -> None:
    """In tiles of the rules, in their loops."""
    (found,) = compiled([(kernel, name, 90, 1)]).values()
    assert found["products"] > 0 and found["spills_in_loops"] <= most, found
    assert found["shared"] == found["bound"] and found["registers"] <= 128, found


@pytest.mark.parametrize("capability", [80, pytest.param(89, marks=pytest.mark.slow), 100])
def test_streams_compile_for_every_nvidia_gpu(compiled: Compiled, capability: int) -> None:
    cases: list[Case] = [
        ("decode 8 2 1 4 1", "int4", capability, 2),
        ("decode 16 1 1 2 0", "fp6", capability, 7),
        ("decode norm 8 2 1 2 0", "nf4", capability, 1),
        ("decode experts gate 8 2 2 1 0", "fp8", capability, 1),
    ]
    for case, found in compiled(cases).items():
        assert found["products"] > 0 and found["spills"] == 0, (case, found)
        assert found["shared"] == found["bound"] and found["registers"] <= 128, (case, found)


@pytest.mark.parametrize("targets", [(90, AMD), pytest.param((80, 89, 100), marks=pytest.mark.slow)], ids=str)
def test_ops_compile_for_every_target(compiled: Compiled, targets: tuple[int, ...]) -> None:
    sizes = {
        "embed": 1,
        "norm": 4096,
        "gate": 1,
        "activate": 2880,
        "rounded norm": 4096,
    }
    sizes |= {"cos_sin": 128, "rotate": 128, "rotate_append": 128, "append": 128, "fill": 128}
    sizes |= {"norm_rotate_append": 128}
    sizes |= {"argmax partial": 1, "argmax combine": 1, "divergence": 1, "shrink": 4096, "expand": 4096}
    sizes |= {
        "small_linear": 2048,
        "norm_linear": 2048,
        "route": 128,
        "route pairs": 128,
        "route groups": 256,
    }
    # Loads of 16 bytes: of rows; of x, other and weight; of x and up; of both halves of numbers and angles.
    wide = {"embed": 1, "norm": 3, "gate": 2, "rotate": 6}
    # Of 16 numbers of a thread.
    wide["argmax partial"] = 2
    # Of weight and x.
    wide["small_linear"] = 2
    # And of what is added, and weights of the norm.
    wide["norm_linear"] = 4
    cases: list[Case] = [
        ("ops", name, capability, m)
        for name, m in sizes.items()
        for capability in targets
        # Their codes are e4m3, which Triton has from 8.9 on, and their linears run on 9.0 alone.
        if capability != 80 or not name.endswith("codes")
    ]
    for (_, name, capability, _), found in compiled(cases).items():
        # The rest of large angles is computed in an array of its own.
        assert found["spills"] == 0 or name == "cos_sin", (name, capability)
        assert found["shared"] <= found["limit"] and not found["approximations"], (name, capability)
        if name in wide and capability != AMD:
            assert found["wide_loads"] == wide[name], (name, capability, found)
            # Angles do not move between threads.
            assert name != "rotate" or found["shared"] == 0, (capability, found)


def test_float16_sums_are_what_consumer_gpus_multiply_at_full_rate(compiled: Compiled) -> None:
    for case, found in compiled(
        [("fp16 sums", "int4", capability, 64) for capability in (80, 86, 89)]
    ).items():
        assert found["sums"] == ["f16"], case


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_kernel_compiles_for_every_target(compiled: Compiled, name: str) -> None:
    kernels = (("portable-gemv", 1), ("portable-gemv", 16), ("portable-gemm", 64), ("dequantize", 1))
    cases: list[Case] = [(kernel, name, cap, m) for cap in (80, 89, 90, 100, AMD) for kernel, m in kernels]
    for case, found in compiled(cases).items():
        kernel, _, capability, _ = case
        if capability == AMD:
            assert_portable_kernels_fit(case, found)
            continue
        assert found["shared"] <= found["limit"], (case, found)
        assert (found["products"] > 0) == (kernel != "dequantize"), (case, found)


@pytest.mark.parametrize(
    ("name", "tile"),
    [
        ("W4AFP8", "128 2 1"),
        pytest.param("W4AFP8", "64 2 1", marks=pytest.mark.slow),
        ("FP8_DYNAMIC", "256 1 0"),
        pytest.param("FP8_DYNAMIC", "128 2 1", marks=pytest.mark.slow),
        ("FP8_BLOCK", "128 2 1"),
        ("W8A8", "256 1 0"),
        pytest.param("W8A8", "64 2 1", marks=pytest.mark.slow),
        ("W4A8", "128 2 1"),
    ],
)
def test_bytes_stay_in_their_registers_until_products_are_done(
    compiled: Compiled, name: str, tile: str
) -> None:
    """Nothing but the kernel keeps the registers of operand A from what is loaded next."""
    (found,) = compiled([(f"bytes {tile}", name, 90, 512)]).values()
    assert found["wgmma"] == found["wgmma_registers"] > 0, found
    assert found["overwritten"] == [], found
    assert found["spills_in_loops"] <= BYTES_SPILLS, found
    assert found["shared"] <= found["limit"], found

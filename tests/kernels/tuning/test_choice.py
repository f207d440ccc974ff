"""What runs where a tile table has the problem, and how the kernel table explains it."""

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import registry as kernel_table
from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.operands import Operands
from quantkit.kernels.gemm.portable import portable_gemm_launch, portable_gemv_launch
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile
from quantkit.kernels.gemm.wgmma import wgmma_launch
from quantkit.kernels.gemm.wgmma.wgmma_tiles import WgmmaTile
from quantkit.kernels.layouts.fragment_layout import build
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem, TileError
from quantkit.kernels.registry import (
    KERNELS,
    choose,
    choose_by_rules,
    explain,
    forget_tile_tables,
    kernel_named,
    log_choice,
)
from quantkit.kernels.report import experts_text, selection_of
from quantkit.kernels.tuning import store
from quantkit.kernels.tuning.store import file_name, shipped_tables
from quantkit.kernels.tuning.tile_table import Entry, Key, TileTable, from_json, to_json
from quantkit.packing.tensor import PackedTensor

from ...support.compare import assert_close

Ask = Callable[..., Problem]
Store = Callable[[dict[Problem, Entry]], Path]

H200 = Gpu("NVIDIA H200", (9, 0), 132, 227 << 10)
TILE = PortableGemvTile(8, 256, 1, False)
RUNS = {"fused-portable-gemv": portable_gemv_launch.run, "fused-portable": portable_gemm_launch.run}


def test_without_a_table_rules_choose(ask: Ask) -> None:
    chosen = choose(ask())
    assert (chosen.kernel.name, chosen.us) == ("fused-gemv", None)
    assert chosen.tile == decode_launch.TILE_SPACE.rule(ask())


def test_an_entry_chooses_row_and_tile_for_its_bucket(ask: Ask, store_table: Store) -> None:
    store_table({ask(m=8): Entry(5.0, "fused-portable-gemv", TILE)})
    for m in (5, 8):
        chosen = choose(ask(m=m))
        assert (chosen.kernel.name, chosen.tile, chosen.us) == ("fused-portable-gemv", TILE, 5.0)
    for other in (ask(m=4), ask(m=9), ask("int8", 8), ask(m=8, n=4112), ask(m=8, dtype=torch.float16)):
        assert choose(other).us is None
    assert choose(replace(ask(m=8), gpu=None)).us is None
    assert choose_by_rules(ask(m=8)).tile != TILE


def test_rows_before_the_fastest_say_how_much_slower_they_are(ask: Ask, store_table: Store) -> None:
    tile = PortableGemmTile(4, 16)
    store_table(
        {
            ask(m=2): Entry(9.0, "fused-portable", tile, {"fused-portable-gemv": 12.34}),
            ask(m=64): Entry(80.0, "dequantize", None, {"fused-portable": 99.0}),
            ask(m=16, n=1024): Entry(8.5, "dequantize"),
        }
    )
    reasons = dict(explain(ask(m=2)))
    assert reasons["fused-portable-gemv"] == "measured slower on this GPU: 12.3 us against 9.0 us"
    assert reasons["fused-portable"] is None
    assert "it runs on cpu" in str(reasons["torch-int4"])
    reasons = dict(explain(ask(m=64)))
    assert "up to 32 rows of x" in str(reasons["fused-portable-gemv"])
    assert reasons["fused-portable"] == "measured slower on this GPU: 99.0 us against 80.0 us"
    assert dict(explain(ask(m=16, n=1024)))["fused-portable-gemv"] == (
        "not measured; on this GPU dequantize was measured: 8.5 us"
    )
    choice = selection_of(ask(m=2))
    assert (choice.kernel, choice.us) == ("fused-portable", 9.0)
    assert choice.tile == (
        "row_tiles=4 block_m=16 split_k=1 warps=4 stages=3 fp16_accumulation=False accumulators=1 occupancy=0"
    )
    assert [name for name, _ in choice.refusals] == [
        *("fused-gemv", "fused-portable-gemv", "fused-small-m", "fused-wgmma")
    ]


def test_a_row_that_rules_say_loses_runs_where_it_was_measured_fastest(ask: Ask, store_table: Store) -> None:
    assert choose(ask(m=32)).kernel.name == "fused-small-m"
    store_table({ask(m=32): Entry(3.0, "fused-portable-gemv", TILE)})
    assert choose(ask(m=32)).kernel.name == "fused-portable-gemv"


def test_forcing_overrides_a_table(ask: Ask, store_table: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store_table({ask(m=8): Entry(5.0, "fused-portable-gemv", TILE)})
    monkeypatch.setenv("QUANTKIT_KERNEL", "fused-portable")
    chosen = choose(ask(m=8))
    assert (chosen.kernel.name, chosen.tile) == (
        "fused-portable",
        portable_gemm_launch.TILE_SPACE.rule(ask(m=8)),
    )
    monkeypatch.setenv("QUANTKIT_KERNEL", "fused-portable-gemv")
    assert choose(ask(m=8)).tile == TILE, "a forced row has the tile that was measured for it"


def test_an_entry_for_what_cannot_run_is_not_used(ask: Ask, store_table: Store) -> None:
    store_table({ask(m=8): Entry(5.0, "fused-portable-gemv", TILE)})
    assert choose(replace(ask(m=8), layout="")).kernel.name == "unpack"
    assert choose(replace(ask(m=8), features=frozenset())).kernel.name == "unpack"
    assert choose(replace(ask(m=8), layout="fragments")).us == 5.0


def test_it_is_said_what_runs_experts_with_few_tokens(ask: Ask) -> None:
    for asked, refused in (
        (ask(), None),
        (ask("nf4", m=64), None),
        (ask(n=4104), "multiples of 16 rows, not for 4104"),
        (ask("book4"), "values of its own"),
    ):
        found = selection_of(asked)
        assert found.ungrouped is None
        said = experts_text(found.ungrouped, found.unshared)
        start, end = said.split("grouped, few tokens for each in ")
        assert not start
        if refused is None:
            assert found.unshared is None
            assert end == "fused-gemv or fused-small-m"
        else:
            assert refused in str(found.unshared)
            assert end == f"fused-portable-gemv, not fused-gemv or fused-small-m: {found.unshared}"
    found = selection_of(ask(dtype=torch.float32))
    assert experts_text(found.ungrouped, found.unshared).startswith("one after the other: it multiplies")


def test_weights_that_were_not_measured_are_left_to_the_rules(ask: Ask, store_table: Store) -> None:
    store_table(
        {ask(m=m, n=5120): Entry(9.0, "fused-portable", PortableGemmTile(4, 16)) for m in (1, 16, 64, 512)}
    )
    for m in (1, 16, 64, 512):
        assert choose(ask(m=m, n=5120)).kernel.name == "fused-portable"
        chosen, ruled = choose(ask(m=m, n=5136)), choose_by_rules(ask(m=m, n=5136))
        assert (chosen.kernel, chosen.tile, chosen.measured) == (ruled.kernel, ruled.tile, None)


def test_a_gpu_like_this_one_says_what_is_fastest_and_not_how_fast(
    ask: Ask, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_table: Store
) -> None:
    tile, split = PortableGemmTile(4, 64), PortableGemmTile(4, 64, split_k=2)
    entries = {Key.of(ask(m=64)): Entry(20.0, "fused-portable", tile, {"fused-wgmma": 31.5})}
    other = replace(gpu, name="Other 1")
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "other_1.json").write_bytes(to_json(TileTable(other, {}, entries), KERNELS))
    monkeypatch.setattr(store, "package_files", lambda package: shipped)
    chosen = choose(ask(m=64))
    assert (chosen.kernel.name, chosen.tile, chosen.us) == ("fused-portable", tile, None)
    assert str(selection_of(ask(m=64)).tile).endswith("occupancy=0 (measured on Other 1)")
    assert dict(explain(ask(m=64)))["fused-wgmma"] == "measured slower on Other 1: 31.5 us against 20.0 us"
    assert choose(replace(ask(m=64), gpu=other)).us == 20.0
    for unlike in (replace(gpu, multiprocessors=114), replace(gpu, capability=(10, 0))):
        asked = replace(ask(m=64), gpu=unlike)
        assert choose(asked).measured is None
    # What was measured here wins.
    store_table({ask(m=64): Entry(30.0, "fused-portable", split)})
    assert (choose(ask(m=64)).tile, choose(ask(m=64)).us) == (split, 30.0)


def test_what_its_own_table_lacks_a_gpu_takes_from_one_like_it(
    ask: Ask, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, own, theirs = (
        replace(gpu, name="A like"),
        PortableGemmTile(4, 64),
        PortableGemmTile(4, 64, split_k=2),
    )
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(store, "package_files", lambda package: shipped)
    for one, tile, rows in ((gpu, own, (64,)), (other, theirs, (64, 128))):
        entries = {Key.of(ask(m=m)): Entry(20.0 + m, "fused-portable", tile) for m in rows}
        (shipped / file_name(one)).write_bytes(to_json(TileTable(one, {}, entries), KERNELS))
    forget_tile_tables()
    assert (choose(ask(m=64)).tile, choose(ask(m=64)).us) == (own, 84.0)
    assert (choose(ask(m=128)).tile, choose(ask(m=128)).us) == (theirs, None)
    assert str(selection_of(ask(m=128)).tile).endswith("(measured on A like)")
    # Of a row that it has no entry for, too.
    (shipped / file_name(gpu)).write_bytes(
        to_json(TileTable(gpu, {}, {Key.of(ask(m=64)): Entry(9.0, "dequantize")}), KERNELS)
    )
    forget_tile_tables()
    assert choose(ask(m=64)).kernel.name == "dequantize"
    monkeypatch.setenv("QUANTKIT_KERNEL", "fused-portable")
    assert choose(ask(m=64)).tile == theirs


def test_between_what_was_measured_tiles_are_fitted(
    ask: Ask, store_table: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """384 rows of x are three tiles of 128, of 256 they would be two, as of 512."""
    measured = WgmmaTile(256, stream_k=True)
    store_table({ask(m=512, n=28672): Entry(174.0, "fused-wgmma", measured, {"fused-portable-gemv": 999.0})})
    for m, tile, us in (
        (512, measured, 174.0),
        (500, measured, 174.0),
        (384, WgmmaTile(128, 192, stream_k=True), None),
    ):
        chosen = choose(ask(m=m, n=28672))
        assert (chosen.kernel.name, chosen.tile, chosen.us) == ("fused-wgmma", tile, us)
    source = "fitted to what was measured on this GPU at M=512"
    assert str(selection_of(ask(m=384, n=28672)).tile).endswith(f"stream_k=True block_k=128 ({source})")
    monkeypatch.setattr(kernel_table, "_logged", set())
    monkeypatch.setenv("QUANTKIT_VERBOSE", "1")
    with caplog.at_level(logging.WARNING):
        log_choice(ask(m=384, n=28672), choose(ask(m=384, n=28672)))
    assert f"stream_k=True block_k=128, {source}; not fused-gemv" in caplog.messages[0]


def test_what_is_sooner_for_more_rows_is_so_for_fewer(ask: Ask, store_table: Store) -> None:
    few, more = WgmmaTile(32, 128, 2, True, 256), WgmmaTile(128, prefetch=2, stream_k=True)
    store_table(
        {
            ask(m=4): Entry(60.0, "fused-portable-gemv", TILE),
            ask(m=16): Entry(50.0, "fused-portable-gemv", PortableGemvTile(2)),
            ask(m=32): Entry(80.0, "dequantize", None, {"fused-portable": 90.0}),
            ask(m=64): Entry(44.0, "fused-portable", PortableGemmTile(4, 64)),
            ask(m=128): Entry(40.0, "fused-wgmma", more, {"fused-portable-gemv": 999.0}),
        }
    )
    chosen = choose(ask(m=32))
    assert (chosen.kernel.name, chosen.tile, chosen.us) == ("fused-wgmma", few, None)
    assert chosen.source == "fitted to what was measured on this GPU at M=128"
    assert dict(explain(ask(m=32)))["fused-portable-gemv"] == (
        "measured slower on this GPU at M=128: 999.0 us against 40.0 us"
    )
    assert choose(ask(m=64)).kernel.name == "fused-portable", "that is within what differs from run to run"
    assert choose(ask(m=16)).kernel.name == "fused-wgmma"
    assert choose(ask(m=15)).kernel.name == "fused-portable-gemv", "which does less than for 16"
    assert choose(ask(m=3)).tile == PortableGemvTile(2), "of the same kernel"


def shipped_tiles(part: float) -> Iterator[tuple[WgmmaTile, WgmmaTile]]:
    """Each tile of `fused-wgmma` in tables for an H200, and what it is fitted to for such a part of M."""
    for key, entry in (
        (key, entry) for table in shipped_tables(H200, KERNELS) for key, entry in table.entries.items()
    ):
        if entry.kernel == "fused-wgmma":
            measured = Problem(key.m, key.n, key.k, key.scheme, key.dtype, "cuda", GPU_FEATURES, None, H200)
            problem = replace(measured, m=int(key.m * part))
            tile = wgmma_launch.TILE_SPACE.adapt(problem, entry.tile, measured)
            assert wgmma_launch.TILE_SPACE.why_invalid(problem, tile) is None
            yield entry.tile, tile


def test_tiles_are_fitted_to_the_weight_and_the_gpu(ask: Ask) -> None:
    """One tile more than there are multiprocessors takes as long as all of them, unless it is shared out."""
    whole = WgmmaTile(128, prefetch=2)
    measured = replace(ask(m=128, n=132 * 128), gpu=H200)
    assert wgmma_launch.TILE_SPACE.adapt(measured, whole, measured) == whole
    assert wgmma_launch.TILE_SPACE.adapt(replace(measured, n=133 * 128), whole, measured).stream_k
    larger = Gpu("larger", (9, 0), 144, 227 << 10)
    measured = replace(measured, gpu=larger)
    assert wgmma_launch.TILE_SPACE.adapt(replace(measured, n=133 * 128), whole, measured) == whole


def test_tiles_of_few_rows_of_x_are_for_few(ask: Ask) -> None:
    why_invalid, why_pruned = wgmma_launch.TILE_SPACE.why_invalid, wgmma_launch.TILE_SPACE.why_pruned
    assert why_invalid(ask("int3", 32), WgmmaTile(32)) is None
    assert why_invalid(ask(k=4224), WgmmaTile(64, block_k=256)) == "4224 columns are no multiple of 256"
    assert why_invalid(ask("int3", k=4224), WgmmaTile(64, block_k=256)) is None, "they have a span to the end"
    assert why_invalid(ask(m=16), WgmmaTile(256, 192)) == (
        "192 rows of the weight are for up to 128 rows of x, not for 256"
    )
    assert why_pruned(ask(m=16), WgmmaTile(64)) == "it multiplies 64 rows of x"
    assert "columns at a time lack registers" in str(why_pruned(ask(m=256), WgmmaTile(256, block_k=256)))
    assert why_pruned(ask(m=65), WgmmaTile(32)) == "it dequantizes each weight for 32 rows of x"
    assert {m for m in (1, 16, 32, 33, 64) if why_pruned(ask(m=m), WgmmaTile(32)) is None} == {
        1,
        16,
        32,
        33,
        64,
    }
    chosen = [
        wgmma_launch.TILE_SPACE.rule(ask(m=m, n=n))
        for m in (1, 16, 64, 300, 4096)
        for n in (128, 4096, 28672)
    ]
    assert {tile.block_m for tile in chosen} == {32, 64, 128, 256}
    assert {tile.block_m for tile, _ in shipped_tiles(0.75)} == {16, 32, 64, 128, 256}
    # Where it was measured, it is for what it was measured for.
    few = WgmmaTile(16)
    assert wgmma_launch.TILE_SPACE.adapt(ask(m=8, n=8192), few, ask(m=16)) == few


def test_a_forced_row_has_the_tile_that_was_measured_for_it(
    ask: Ask, store_table: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tile = PortableGemmTile(4, 64, stages=4)
    store_table(
        {
            ask(m=64): Entry(68.0, "fused-portable", tile),
            ask(m=128): Entry(50.0, "fused-wgmma", WgmmaTile(stream_k=True)),
        }
    )
    assert choose(ask(m=64)).kernel.name == "fused-wgmma"
    monkeypatch.setenv("QUANTKIT_KERNEL", "fused-portable")
    assert (choose(ask(m=64)).tile, choose(ask(m=64)).us) == (tile, 68.0)
    monkeypatch.setenv("QUANTKIT_KERNEL", "fused-wgmma")
    assert choose(ask(m=64)).measured.m == 128


def test_what_cannot_run_is_not_sooner(ask: Ask, store_table: Store) -> None:
    store_table(
        {
            ask(m=64): Entry(68.0, "fused-portable", PortableGemmTile(4, 64)),
            ask(m=128): Entry(50.0, "fused-wgmma", WgmmaTile(stream_k=True)),
        }
    )
    without = replace(ask(m=64), features=GPU_FEATURES - {"gluon"})
    assert choose(without).kernel.name == "fused-portable"


def test_the_log_shows_each_tile_of_a_weight(
    ask: Ask, store_table: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store_table({ask(m=512, n=28672): Entry(174.0, "fused-wgmma", WgmmaTile(256, stream_k=True))})
    monkeypatch.setattr(kernel_table, "_logged", set())
    monkeypatch.setenv("QUANTKIT_VERBOSE", "1")
    with caplog.at_level(logging.WARNING):
        for m in (512, 511, 384, 383):
            log_choice(ask(m=m, n=28672), choose(ask(m=m, n=28672)))
    assert ["m=256" in message for message in caplog.messages] == [True, False]


def test_a_damaged_table_stops_before_anything_runs(ask: Ask, store_table: Store) -> None:
    path = store_table({})
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(KernelError, match=rf"tile table {path} is damaged: .* Delete it"):
        choose(ask())


def test_the_log_shows_tile_and_time(
    ask: Ask, store_table: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store_table({ask(m=8): Entry(5.0, "fused-portable-gemv", TILE)})
    monkeypatch.setattr(kernel_table, "_logged", set())
    monkeypatch.setenv("QUANTKIT_VERBOSE", "1")
    with caplog.at_level(logging.WARNING):
        log_choice(ask(m=7), choose(ask(m=7)))
    assert (
        ": fused-portable-gemv warps=8 columns=256 row_tiles=1 prefetch=False unroll=16 predicate_x=False "
        "one_accumulator=False, measured 5.0 us; not fused-gemv: not measured; on this GPU "
        "fused-portable-gemv was"
    ) in caplog.messages[0]


@pytest.mark.parametrize(
    ("m", "entry"),
    [
        (3, Entry(5.0, "fused-portable-gemv", PortableGemvTile(2, 128, 2, True))),
        (20, Entry(5.0, "fused-portable", PortableGemmTile(8, 32, 2, 8, 2))),
    ],
)
def test_the_tile_of_a_table_is_what_is_launched(
    ask: Ask,
    store_table: Store,
    make_packed: Callable[..., PackedTensor],
    reference: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    m: int,
    entry: Entry,
) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    n, k = 40, 256
    # Triton's interpreter has no products of 16-bit floats; a launch takes what it is given.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    store_table({ask("int4", m, n, k): entry})
    module, name = (
        (portable_gemv_launch, "_launch")
        if entry.kernel == "fused-portable-gemv"
        else (portable_gemm_launch, "_launches")
    )
    launched, found = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *given: launched.append(given[1]) or found(*given))
    packed = make_packed("int4", (n, k)).to(device)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    y = choose(ask("int4", m, n, k)).launch(x, packed, build(packed, x.dtype), None)
    assert launched == [entry.tile]
    assert_close(y.double(), reference(x, packed), norm=1e-5 if device == "cpu" else 1e-2)


def random_tiles(ask: Ask, gpu: Gpu, row: str, count: int) -> list[Any]:
    """Tiles that a table may have for a small weight, as it would be read from a file that anyone wrote."""
    random, problem, found = Random(0), ask("int4", 3, 40, 256), list[Any]()
    tile_space = kernel_named(row).tile_space
    assert tile_space is not None
    values = {
        field.name: (*tile_space.values.get(field.name, ()), 0, 1, 2, 4)
        for field in fields(tile_space.record)
    }
    while len(found) < count:
        numbers = {name: random.choice(some) for name, some in values.items()}
        tile = tile_space.record(
            **{
                f.name: bool(numbers[f.name]) if f.type is bool else numbers[f.name]
                for f in fields(tile_space.record)
            }
        )
        data = to_json(TileTable(gpu, {}, {Key.of(problem): Entry(5.0, row, tile)}), KERNELS)
        with suppress(KernelError):
            (entry,) = from_json(data, gpu, KERNELS).entries.values()
            found += [entry.tile] * (entry.tile not in found)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="tiles of float32 are the interpreter's")
@pytest.mark.parametrize("row", RUNS)
def test_the_numbers_do_not_depend_on_the_table(
    ask: Ask,
    gpu: Gpu,
    row: str,
    make_packed: Callable[..., PackedTensor],
    reference: Callable[..., torch.Tensor],
) -> None:
    pytest.importorskip("triton")
    packed, run = make_packed("int4", (40, 256)), RUNS[row]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    op = Operands(x, build(packed, x.dtype), None, packed.scheme, 40)
    for tile in random_tiles(ask, gpu, row, 4):
        # Sums in float16 are for float16 activations.
        if not getattr(tile, "fp16_accumulation", False):
            assert_close(run(op, tile).double(), reference(x, packed), norm=1e-5, name=tile)


def test_a_tile_that_does_not_fit_says_where_it_may_be_from(
    make_packed: Callable[..., PackedTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    class OutOfResources(Exception):
        pass

    def too_large(*_: object, **__: object) -> None:
        raise OutOfResources("shared memory, Required: 2, Hardware limit: 1")

    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(portable_gemv_launch, "_launch", too_large)
    packed = make_packed("int4", (16, 128)).to("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.zeros(1, 128, device=packed.device)
    with pytest.raises(
        TileError, match=r"tile PortableGemvTile\(warps=8.*too large for this GPU: shared.*delete that"
    ):
        kernel_named("fused-portable-gemv").launch(x, packed, build(packed, x.dtype), None, tile=TILE)


def test_rules_follow_the_size_of_the_gpu(ask: Ask, gpu: Gpu) -> None:
    """A weight that leaves a large GPU idle without splitting keeps a small one busy."""
    # Without `fused-wgmma`, which divides nothing by columns.
    problem = replace(ask(m=64, n=8192), features=GPU_FEATURES - {"gluon"}, gpu=H200)
    assert choose(problem).tile.split_k > 1
    small = replace(gpu, name="small", multiprocessors=20, shared_memory=99 << 10)
    assert choose(replace(problem, gpu=small)).tile.split_k == 1

"""`quantkit tune` with a GPU and measurements that are made up, and `doctor` with a tile table."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.cli.commands import doctor, tune
from quantkit.kernels import problem
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile
from quantkit.kernels.problem import GPU_FEATURES, Gpu
from quantkit.kernels.registry import KERNELS, forget_tile_tables
from quantkit.kernels.tuning import gpu_bench as gpu_module
from quantkit.kernels.tuning.search import Candidate, Weight
from quantkit.kernels.tuning.store import user_path, user_table

GPU = Gpu("Test GPU 3000", (9, 0), 130, 227 << 10)
BEST = {
    "fused-portable-gemv": PortableGemvTile(8, 512, 1, True),
    "fused-portable": PortableGemmTile(4, 64, 4, 4, 2),
}


class Bench:
    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def error(self, candidate: Candidate, m: int) -> float:
        return 1.0 if candidate.tile == PortableGemvTile(4, 256, 1, True) else 0.0

    def time(self, candidate: Candidate, m: int, replays: int) -> float:
        if candidate.tile == PortableGemvTile(4, 256, 1, True):
            return 1.0
        return (
            30.0 if candidate.tile is None else 8.0 if candidate.tile == BEST.get(candidate.kernel) else 12.0
        )


class Pool:
    def __init__(self, jobs: int, target: object) -> None:
        assert jobs >= 1

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, *_: object) -> Callable[[], None]:
        return lambda: None


@contextmanager
def bench(weight: Weight) -> Iterator[Bench]:
    yield Bench(weight)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("QUANTKIT_TILES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("quantkit.devices.best_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(problem, "gpu_of", lambda device: GPU if device.type == "cuda" else None)
    monkeypatch.setattr(problem, "device_features", lambda device: GPU_FEATURES)
    monkeypatch.setattr(doctor, "_machine", lambda: {"gpu 0": GPU.name})
    monkeypatch.setattr(tune, "_versions", lambda: {"triton": "3.6.0"})
    monkeypatch.setattr(gpu_module, "gpu_bench", bench)
    monkeypatch.setattr(gpu_module, "CompilePool", Pool)
    monkeypatch.setattr(gpu_module, "gpu_target", lambda: ("cuda", 90, 32))
    forget_tile_tables()
    yield
    forget_tile_tables()


def entries() -> dict[tuple[str, int, int, int], Any]:
    table = user_table(GPU, KERNELS)
    assert table is not None
    return {(str(key.scheme), key.n, key.k, key.m): entry for key, entry in table.entries.items()}


def test_shapes_and_formats(run: Callable[..., Any]) -> None:
    done = run("tune", "--shapes", "llama3-8b.o,64x256", "--formats", "int4,int2:64", "--m", "1,3,64")
    path = user_path(GPU)
    assert done.code == 0
    assert f"12 problems measured, 4 faster than by the rules; wrote {path}\n" in done.out
    assert "gain" in done.out and "1.50x" in done.out
    assert "fused-portable-gemv warps=8 columns=512 row_tiles=1 prefetch=True" in done.out
    assert (
        "fused-portable-gemv warps=4 columns=256 row_tiles=1 prefetch=True unroll=16 "
        "predicate_x=False one_accumulator=False is not used: its result is wrong" in done.err
    )
    found = entries()
    assert {key[:3] for key in found} == {
        (scheme, n, k)
        for scheme in ("int4 g128 bfloat16", "int2 g64 bfloat16")
        for n, k in ((4096, 4096), (64, 256))
    }
    assert {key[3] for key in found} == {1, 4, 64}, "3 rows of x use the entry of 4"
    assert found["int4 g128 bfloat16", 4096, 4096, 1].tile == BEST["fused-portable-gemv"]
    assert found["int4 g128 bfloat16", 4096, 4096, 64].tile == BEST["fused-portable"]


def test_a_second_run_adds_to_the_table(run: Callable[..., Any]) -> None:
    assert run("tune", "--shapes", "64x256", "--formats", "int8", "--m", "1").code == 0
    assert run("tune", "--shapes", "64x256", "--formats", "int4", "--m", "1", "--passes", "0").code == 0
    assert len(entries()) == 2


def test_a_checkpoint_is_measured_in_its_shapes(run: Callable[..., Any], packed: Path) -> None:
    done = run("tune", packed, "--m", "1", "--json")
    report = json.loads(done.out)
    assert (done.code, report["gpu"], report["table"]) == (0, GPU.name, str(user_path(GPU)))
    assert {(entry["scheme"], entry["n"], entry["k"]) for entry in report["measured"]} == {
        ("int4 channel bfloat16", 64, 64),
        ("int4 channel bfloat16", 32, 64),
        ("int4 channel bfloat16", 172, 64),
        ("int4 g128 bfloat16", 64, 172),
    }
    for entry in report["measured"]:
        assert entry["fastest"]["us"] <= entry["rules"]["us"]
        assert entry["rules"]["kernel"] in entry["measured"]


def test_only_the_kernels_that_are_named_try_more_tiles(run: Callable[..., Any]) -> None:
    done = run(
        *(
            "tune",
            "--shapes",
            "33280x256",
            "--formats",
            "int4",
            "--m",
            "64",
            "--kernels",
            "fused-portable",
            "--json",
        )
    )
    (entry,) = json.loads(done.out)["measured"]
    tried = [candidate.split()[0] for candidate in entry["measured"]]
    assert tried.count("fused-wgmma") == 1 and tried.count("fused-portable") > 5
    assert entry["fastest"]["kernel"].startswith("fused-portable")


def test_weights_without_tiles_are_named(run: Callable[..., Any]) -> None:
    done = run("tune", "--shapes", "64x256", "--formats", "int4:48,int8", "--m", "1")
    assert done.code == 0
    assert (
        "int4 g48 bfloat16 64x256: there is nothing to tune, because dequantize does not run it: it takes"
        in done.err
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "name a packed checkpoint directory to tune for, or --shapes"),
        (("--shapes", "llama9"), 2, "unknown shape 'llama9'; known are llama3-8b, llama3-70b,"),
        (("--shapes", "llama3-8b.head"), 2, "unknown shape 'llama3-8b.head'"),
        (("--shapes", "0x12"), 2, "unknown shape '0x12'"),
        (("--shapes", ","), 2, "--shapes is empty"),
        (("--shapes", "64x64", "--formats", ""), 2, "--formats is empty"),
        (("--shapes", "64x64", "--formats", "int44"), 4, "unknown format 'int44'"),
        (("--shapes", "64x64", "--formats", "int4:x"), 2, "'x'"),
        (("--shapes", "64x64", "--kernels", ","), 2, "--kernels is empty"),
        (
            ("--shapes", "64x64", "--kernels", "fused-portable,dequantize"),
            2,
            "unknown kernel with tiles 'dequantize'; known are fused-gemv, fused-portable-gemv, "
            "fused-small-m, fused-wgmma, fused-portable.",
        ),
        (("--shapes", "64x64", "--m", "0"), 2, "--m is '0'; it is numbers from 1 to 65536"),
        (("--shapes", "64x64", "--m", "a"), 2, "--m is 'a'"),
        (("--shapes", "64x64", "--fp16-accumulation"), 2, "is for --dtype float16, not bfloat16"),
        (
            ("--shapes", "64x64", "--dtype", "float32"),
            2,
            "--dtype is 'float32'; kernels with tiles take bfloat16",
        ),
    ],
)
def test_wrong_options_are_refused_in_words(
    run: Callable[..., Any], arguments: tuple[str, ...], code: int, message: str
) -> None:
    done = run("tune", *arguments)
    assert (done.code, done.out) == (code, "")
    assert message in done.err
    assert not Path(str(user_path(GPU))).exists()


def test_float16_sums_have_entries_of_their_own(run: Callable[..., Any]) -> None:
    arguments = ("tune", "--shapes", "64x256", "--formats", "int4", "--m", "64", "--dtype", "float16")
    assert run(*arguments).code == 0
    assert run(*arguments, "--fp16-accumulation").code == 0
    table = user_table(GPU, KERNELS)
    assert table is not None
    assert {key.fp16_accumulation for key in table.entries} == {False, True}


def test_shapes_or_a_checkpoint(run: Callable[..., Any], packed: Path) -> None:
    assert run("tune", packed, "--shapes", "64x64").code == 2


@pytest.mark.fault(70)
def test_without_a_gpu_tuning_is_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("tune", "--shapes", "64x64")
    assert (done.code, done.out) == (7, "")
    assert "there is no GPU to measure on: torch finds no device. Run `quantkit tune` where" in done.err


@pytest.mark.fault(70)
def test_without_triton_tuning_is_refused(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "device_features", lambda device: frozenset())
    done = run("tune", "--shapes", "64x64")
    assert done.code == 7
    assert "Triton is not installed" in done.err


def test_a_cache_that_cannot_be_written_is_found_before_measuring(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_module, "gpu_bench", None)
    (tmp_path / "cache").write_text("")
    done = run("tune", "--shapes", "64x64")
    assert (done.code, done.out) == (5, "")
    assert "cannot write the tile table" in done.err and "XDG_CACHE_HOME" in done.err


@pytest.mark.fault(71)
def test_a_damaged_table_is_replaced(run: Callable[..., Any]) -> None:
    path = Path(str(user_path(GPU)))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    done = run("tune", "--shapes", "64x256", "--formats", "int8", "--m", "1")
    assert done.code == 0
    assert f"the tile table {path} is damaged: " in done.err and "It is replaced." in done.err
    assert len(entries()) == 1


def test_entries_of_other_versions_are_dropped(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("tune", "--shapes", "64x256", "--formats", "int8", "--m", "1,2").code == 0
    monkeypatch.setattr(tune, "_versions", lambda: {"triton": "3.7.0"})
    done = run("tune", "--shapes", "64x256", "--formats", "int4", "--m", "1")
    assert done.code == 0
    assert "the 2 entries of your tile table are dropped: made with triton 3.6.0" in done.err
    assert len(entries()) == 1


@pytest.mark.fault(71)
def test_what_is_found_before_an_interrupt_is_kept(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Bench):
        def time(self, candidate: Candidate, m: int, replays: int) -> float:
            if str(self.weight.scheme).startswith("int4"):
                raise KeyboardInterrupt
            return super().time(candidate, m, replays)

    @contextmanager
    def interrupted(weight: Weight) -> Iterator[Bench]:
        yield Interrupted(weight)

    monkeypatch.setattr(gpu_module, "gpu_bench", interrupted)
    done = run("tune", "--shapes", "64x256", "--formats", "int8,int4", "--m", "1")
    assert done.code == 130
    assert {key[0] for key in entries()} == {"int8 channel bfloat16"}


def test_doctor_shows_tables_and_what_they_choose(run: Callable[..., Any], packed: Path) -> None:
    assert "tile table       none for this GPU, rules choose; `quantkit tune` measures" in run("doctor").out
    assert run("tune", packed, "--m", "1").code == 0
    done = run("doctor", packed, "--m", "1,2", "--reasons")
    assert f"tile table       {user_path(GPU)}: 4 entries, made with triton 3.6.0" in done.out
    assert "scheme                 NxK     activations  M=1" in done.out
    assert "\nint4 g128 bfloat16, 64x172, bfloat16, M=1: fused-portable-gemv warps=" in done.out
    assert ", measured 12.0 us\n" in done.out
    report = json.loads(run("doctor", packed, "--m", "1,2", "--json").out)
    assert report["tile_tables"] == [
        {"source": str(user_path(GPU)), "entries": 4, "made_with": "triton 3.6.0"}
    ]
    measured = {entry["m"] for entry in report["kernels"] if entry["us"] is not None}
    assert measured == {1}


def test_doctor_says_where_float16_sums_pay(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "float16 sums     bring nothing on this GPU" in run("doctor").out
    monkeypatch.setattr(problem, "gpu_of", lambda device: replace(GPU, capability=(8, 9)))
    assert (
        "float16 sums     off unless torch.backends.cuda.matmul.allow_fp16_accumulation" in run("doctor").out
    )


def test_doctor_names_a_damaged_table(run: Callable[..., Any]) -> None:
    path = Path(str(user_path(GPU)))
    path.parent.mkdir(parents=True)
    path.write_text("{")
    done = run("doctor")
    assert (done.code, done.out) == (6, "")
    assert f"the tile table {path} is damaged" in done.err


def test_a_table_of_another_gpu_is_left_out(
    run: Callable[..., Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("tune", "--shapes", "64x256", "--formats", "int8", "--m", "1").code == 0
    other = replace(GPU, multiprocessors=7)
    monkeypatch.setattr(problem, "gpu_of", lambda device: other)
    with caplog.at_level(logging.WARNING):
        assert json.loads(run("doctor", "--json").out)["tile_tables"] == []
    assert len(caplog.messages) == 1, "said once, not for every problem"

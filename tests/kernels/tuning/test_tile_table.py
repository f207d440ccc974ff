"""Tile tables as files: what is read is what was written, and whatever else is there is refused in words."""

import copy
import json
import logging
import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.errors import KernelError, OutputError, UsageError
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile
from quantkit.kernels.problem import Gpu, Problem
from quantkit.kernels.registry import KERNELS
from quantkit.kernels.tuning import store
from quantkit.kernels.tuning.store import file_name, named_tables, save, stored_tables, user_path, user_table
from quantkit.kernels.tuning.tile_table import (
    Entry,
    Key,
    OtherTable,
    TileTable,
    bucket,
    from_json,
    time_of,
    to_json,
)
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme

Ask = Callable[..., Problem]

SKINNY = Entry(5.43, "fused-portable-gemv", PortableGemvTile(4, 512, 1, True))
TILED = Entry(12.0, "fused-portable", PortableGemmTile(4, 64, 4, 4, 4), {"fused-portable-gemv": 20.25})
DENSE = Entry(57.5, "dequantize", None, {"fused-portable": 60.0})


@pytest.fixture
def table(gpu: Gpu, ask: Ask) -> TileTable:
    found: dict[Key, Entry] = {}
    for name in ("int4", "nvfp4", "int7"):
        for n, k in ((4096, 4096), (4096, 14336)):
            for m, entry in ((1, SKINNY), (64, TILED), (1024, DENSE)):
                found[Key.of(ask(name, m, n, k))] = entry
    found[Key.of(ask("int4", 2, dtype=torch.float16))] = SKINNY
    return TileTable(gpu, {"quantkit": "0.1.0", "triton": "3.6.0"}, found)


def test_what_is_read_is_what_was_written(table: TileTable, gpu: Gpu) -> None:
    data = to_json(table, KERNELS)
    assert from_json(data, gpu, KERNELS) == table
    assert to_json(from_json(data, gpu, KERNELS), KERNELS) == data
    shuffled = list(table.entries.items())
    random.Random(0).shuffle(shuffled)
    assert to_json(replace(table, entries=dict(shuffled)), KERNELS) == data, "the same table is the same file"


def test_a_weight_is_a_line(table: TileTable, ask: Ask) -> None:
    key = Key.of(ask("int4", 1))
    changed = table.with_entries({key: replace(SKINNY, us=9.0)})
    lines = [data.decode().splitlines() for data in (to_json(table, KERNELS), to_json(changed, KERNELS))]
    different = [pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]
    assert len(different) == 1
    assert different[0][0].startswith(
        '"4096x4096": {"1": [5.43, "fused-portable-gemv", [4, 512, 1, true, 16, false, false]], "64": [12.0'
    )
    empty = replace(table, entries={})
    assert from_json(to_json(empty, KERNELS), table.gpu, KERNELS) == empty


def test_every_format_can_be_in_a_table(gpu: Gpu, ask: Ask) -> None:
    problems = [ask(name, 512) for name in PRESETS if scheme(name).planes == 1]
    table = TileTable(gpu, {}, {Key.of(problem): DENSE for problem in problems})
    assert from_json(to_json(table, KERNELS), gpu, KERNELS) == table


def test_entries_are_for_rows_of_x_up_to_a_power_of_two(ask: Ask) -> None:
    assert [bucket(m) for m in (1, 2, 3, 4, 5, 16, 17, 1000)] == [1, 2, 4, 4, 8, 16, 32, 1024]
    assert Key.of(ask(m=9)) == Key.of(ask(m=16)) != Key.of(ask(m=8))


def test_what_no_kernel_sees_is_not_in_the_key(ask: Ask) -> None:
    plain = ask("ternary")
    assert Key.of(replace(plain, scheme=scheme("ternary", packing="radix"))) == Key.of(plain)
    assert Key.of(ask("binary-rank1")).scheme == scheme("binary", group_size="channel")
    assert Key.of(replace(ask("fp8"), scheme=scheme("fp8", group_size="tensor"))) == Key.of(ask("fp8"))
    blocks = replace(scheme("fp8"), group_size=128, group_rows=128)
    assert Key.of(replace(ask("fp8"), scheme=blocks)).scheme == replace(blocks, group_rows=1)
    long = replace(ask(k=96), scheme=scheme("int4", group_size=128))
    assert Key.of(long).scheme.group_size is None


def _first(data: dict[str, Any]) -> dict[str, Any]:
    """The entries of the first weight by M."""
    return next(iter(data["weights"][0]["shapes"].values()))


def damage(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def damaged(data: bytes) -> bytes:
        value = json.loads(data)
        change(value)
        return json.dumps(value).encode()

    return damaged


def entry(value: Any, m: str = "1") -> Callable[[bytes], bytes]:
    return damage(lambda data: _first(data).update({m: value}))


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "the file is empty; expected a JSON object"),
        (lambda data: data[:-9], "the file is invalid"),
        (lambda data: b"\xff" + data, "the file is invalid"),
        (lambda data: b"[" * 100_000, "nested too deeply"),
        (lambda data: b"[1]", r"the file is \[1\]; expected a JSON object"),
        (lambda data: data.replace(b'"tiles"', b'"version"', 1), "key 'version' occurs twice"),
        (
            damage(lambda data: data.update(extra=1)),
            r"the file has the keys \['extra'\]; expected version, gpu",
        ),
        (damage(lambda data: data.pop("weights")), "'weights' of the file is None; expected a list"),
        (damage(lambda data: data.update(version="1")), "'version' of the file is '1'; expected an integer"),
        (damage(lambda data: data.update(gpu=3)), "'gpu' of the file is 3; expected an object"),
        (damage(lambda data: data["gpu"].update(more=3)), "'gpu' has the keys"),
        (damage(lambda data: data.update(made_with={"torch": 2})), "'made_with' is"),
        (damage(lambda data: data["tiles"]["fused-portable"].pop()), "'tiles' is .*; expected .*stages"),
        (damage(lambda data: data["weights"].append(3)), "'weights' has 3"),
        (damage(lambda data: data["weights"][0].update(n=1)), "a weight has the keys"),
        (damage(lambda data: data["weights"][0].update(dtype="int8")), "the dtype of fp4-e2m1 .* is 'int8'"),
        (
            damage(lambda data: data["weights"][0].update(fp16_accumulation=True)),
            "'fp16_accumulation' of .* is true for bf",
        ),
        (damage(lambda data: data["weights"][0].pop("fp16_accumulation")), "expected true or false"),
        (damage(lambda data: data["weights"][0]["scheme"].pop("format")), "a scheme has the fields"),
        (damage(lambda data: data["weights"][0]["scheme"].update(format="int44")), "int44"),
        (
            damage(lambda data: data["weights"][0]["scheme"].update(packing="radix")),
            "packing 'radix'|should be",
        ),
        (
            damage(lambda data: data["weights"][0]["scheme"].update(column_scale=True)),
            "should be fp4-e2m1 g16 e4m3",
        ),
        (damage(lambda data: data["weights"].append(data["weights"][0])), "M=1 .* occurs twice"),
        (
            damage(lambda data: data["weights"][0]["shapes"].update({"4096": {}})),
            "the shape '4096'; expected N",
        ),
        (damage(lambda data: data["weights"][0]["shapes"].update({"0x8": {}})), "the shape '0x8'"),
        (damage(lambda data: data["weights"][0]["shapes"].update({"99999999x8": {}})), "99999999x8"),
        (
            damage(lambda data: data["weights"][0]["shapes"].update({"8x8": []})),
            "8x8 is \\[\\]; expected an object",
        ),
        (entry(SKINNY.us), "is 5.43; expected"),
        (entry([]), r"is \[\]; expected \[microseconds, row"),
        (
            entry([1.0, "fused-wide"]),
            "names the row 'fused-wide'; known are fused-gemv, fused-portable-gemv, .*unpack",
        ),
        (entry([1.0, "torch-int4"]), "names the row 'torch-int4'"),
        (entry([1.0, ["fused-portable-gemv"]]), "names the row"),
        (
            entry([1.0, "fused-portable-gemv"]),
            "has the tile None; expected warps, columns, row_tiles, prefetch",
        ),
        (entry([1.0, "fused-portable-gemv", [4, 512, 1]]), "has the tile"),
        (entry([1.0, "fused-portable-gemv", [4, 512, 1, 1]]), "has the tile"),
        (entry([1.0, "fused-portable-gemv", [4, 512, True, True]]), "has the tile"),
        (entry([1.0, "fused-portable-gemv", [4, 512.0, 1, True]]), "has the tile"),
        (
            entry([1.0, "fused-portable-gemv", [3, 512, 1, True, 16, False, False]]),
            "cannot be: warps is one of 2, 4, 8, not 3",
        ),
        (
            entry([1.0, "fused-portable-gemv", [4, 1 << 40, 1, True, 16, False, False]]),
            "cannot be: columns is one of",
        ),
        (
            entry([1.0, "fused-portable-gemv", [4, 512, 1, True, 16, False, False]], "64"),
            "cannot be: it takes up to 32 rows of x, not 64",
        ),
        (entry([1.0, "fused-portable", [4, 16, 1, 4, 99, False, 1, 0]]), "cannot be: stages is one of"),
        (entry([1.0, "dequantize", [1]]), r"has \[\[1\]\] at its end"),
        (entry([1.0, "dequantize", {}, 3]), "at its end"),
        (entry([0, "dequantize"]), "has 0; expected microseconds"),
        (entry([True, "dequantize"]), "has True; expected microseconds"),
        (entry([float("nan"), "dequantize"]), "has nan; expected microseconds"),
        (entry([float("inf"), "dequantize"]), "has inf; expected microseconds"),
        (entry([1.0, "dequantize", {"fused": 1.0}]), "names the row 'fused'"),
        (entry([1.0, "dequantize", {"fused-portable": "1"}]), "has '1'; expected microseconds"),
        (entry([1.0, "dequantize"], "3"), "M is '3'; expected a power of two"),
        (entry([1.0, "dequantize"], "01"), "M is '01'"),
        (entry([1.0, "dequantize"], "-1"), "M is '-1'"),
        (entry([1.0, "dequantize"], "٤"), "M is"),
        (entry([1.0, "dequantize"], str(1 << 17)), "M is '131072'"),
    ],
)
def test_damage_is_refused_in_words(
    table: TileTable, gpu: Gpu, change: Callable[[bytes], bytes], message: str
) -> None:
    data = change(to_json(table, KERNELS))
    with pytest.raises(KernelError, match=message):
        from_json(data, gpu, KERNELS)
    path = user_path(gpu)
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    with pytest.raises(
        KernelError, match=r"the tile table /\S+ is damaged: .*Delete it, or run `quantkit tune`"
    ):
        stored_tables(gpu, KERNELS)


def test_steps_must_be_divided_by_the_split(gpu: Gpu, ask: Ask) -> None:
    table = TileTable(
        gpu, {}, {Key.of(ask(m=64, k=384)): Entry(1.0, "fused-portable", PortableGemmTile(4, 64, 4))}
    )
    with pytest.raises(KernelError, match="3 steps are not divided by a split of 4"):
        from_json(to_json(table, KERNELS), gpu, KERNELS)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [place for key in keys for place in ((value, key), *_places(value[key]))]


def test_no_change_of_one_value_gets_through_as_another_error(table: TileTable, gpu: Gpu) -> None:
    whole = json.loads(to_json(table, KERNELS))
    dice = random.Random(0)
    refused = 0
    for index in range(len(_places(whole))):
        data = copy.deepcopy(whole)
        container, key = _places(data)[index]
        container[key] = dice.choice([None, True, -1, 0, 7, 1e400, "x", "", [], {}, [[]], {"a": 1}, 10**30])
        try:
            from_json(json.dumps(data).encode(), gpu, KERNELS)
        except (KernelError, OtherTable):
            refused += 1
    assert refused > 100


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage(lambda data: data.update(version=1)), "it has version 1, these kernels have 14"),
        # As they were before there was another row.
        (
            damage(lambda data: (data.update(version=3), data["tiles"].pop("fused-wgmma"))),
            "it has version 3, these kernels have 14",
        ),
        (
            damage(lambda data: data["gpu"].update(name="Other")),
            "it is for .*Other.*, this is .*Test GPU 3000",
        ),
        (damage(lambda data: data["gpu"].update(multiprocessors=7)), "it is for"),
        (damage(lambda data: data["gpu"].update(capability=[8, 9])), "it is for"),
    ],
)
def test_other_versions_and_gpus_are_left_out_with_a_warning(
    table: TileTable,
    gpu: Gpu,
    change: Callable[[bytes], bytes],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = change(to_json(table, KERNELS))
    with pytest.raises(OtherTable, match=message):
        from_json(data, gpu, KERNELS)
    path = save(table, KERNELS)
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert stored_tables(gpu, KERNELS) == ()
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "is not used" in record.getMessage()


def test_files_of_tables_have_safe_names(gpu: Gpu) -> None:
    names = {"NVIDIA H200": "nvidia_h200.json", "../../x y": "x_y.json", "": "gpu.json", "é": "gpu.json"}
    for name, expected in names.items():
        assert file_name(replace(gpu, name=name)) == expected
    assert len(file_name(replace(gpu, name="a" * 999))) < 120


def test_where_the_users_table_is(gpu: Gpu, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert user_path(gpu) == cache / "quantkit" / "tiles" / "test_gpu_3000.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(cache / "home"))
    assert user_path(gpu) == cache / "home" / ".cache" / "quantkit" / "tiles" / "test_gpu_3000.json"


def test_without_a_home_directory(table: TileTable, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert user_path(gpu) is None
    assert stored_tables(gpu, KERNELS) == ()
    with pytest.raises(OutputError, match=r"no home directory .* Set XDG_CACHE_HOME"):
        save(table, KERNELS)


def test_the_users_table_wins_over_the_shipped_one(
    table: TileTable, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / file_name(gpu)).write_bytes(to_json(table, KERNELS))
    monkeypatch.setattr(store, "package_files", lambda package: shipped)
    assert [found.source for found in stored_tables(gpu, KERNELS)] == ["shipped"]
    assert user_table(gpu, KERNELS) is None
    path = save(replace(table, entries={}), KERNELS)
    found = stored_tables(gpu, KERNELS)
    assert [(one.source, len(one.table.entries)) for one in found] == [(str(path), 0), ("shipped", 19)]
    monkeypatch.setenv("QUANTKIT_TILES", "none")
    assert stored_tables(gpu, KERNELS) == ()
    assert user_table(gpu, KERNELS) is not None


def test_a_gpu_without_a_table_has_that_of_one_like_it(
    table: TileTable, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    (shipped / "a.json").mkdir()
    (shipped / "notes.txt").write_text("no table")
    file = shipped / file_name(gpu)
    file.write_bytes(to_json(table, KERNELS))
    monkeypatch.setattr(store, "package_files", lambda package: shipped)
    like = replace(gpu, name="Like it")
    (found,) = stored_tables(like, KERNELS)
    assert (found.source, found.table.gpu.name) == ("shipped, measured on Test GPU 3000", gpu.name)
    assert found.table.entries == table.entries
    # Of less memory some tiles are too large, which is found where they are chosen.
    (found,) = stored_tables(replace(like, shared_memory=48 << 10), KERNELS)
    assert found.table.entries == table.entries
    for unlike in (replace(like, multiprocessors=114), replace(like, capability=(10, 0))):
        assert stored_tables(unlike, KERNELS) == ()
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(KernelError, match=rf"the tile table {file} is damaged: .*Delete it"):
        stored_tables(like, KERNELS)


def test_what_its_own_table_lacks_a_gpu_has_of_one_like_it(
    table: TileTable, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    # By name it comes before, and all the same after.
    like = replace(gpu, name="A like")
    few = dict(list(table.entries.items())[:2])
    (shipped / file_name(gpu)).write_bytes(to_json(replace(table, entries=few), KERNELS))
    (shipped / file_name(like)).write_bytes(to_json(replace(table, gpu=like), KERNELS))
    monkeypatch.setattr(store, "package_files", lambda package: shipped)
    assert [(one.source, len(one.table.entries)) for one in stored_tables(gpu, KERNELS)] == [
        ("shipped", 2),
        ("shipped, measured on A like", 19),
    ]
    assert [one.source for one in stored_tables(like, KERNELS)] == [
        "shipped",
        f"shipped, measured on {gpu.name}",
    ]


def test_a_table_is_found_by_the_name_of_its_gpu(
    table: TileTable, gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GPU that is not here, the user's before the shipped one."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    monkeypatch.setattr(store, "package_files", lambda package: shipped)
    with pytest.raises(UsageError, match=r"no table of measured times for a GPU 'h'; there are none\. Run"):
        named_tables("h", KERNELS)
    (shipped / file_name(gpu)).write_bytes(to_json(table, KERNELS))
    path = save(replace(table, entries={}), KERNELS)
    for name in (gpu.name, "test_gpu_3000", "test-gpu-3000"):
        found = named_tables(name, KERNELS)
        assert [(one.source, len(one.table.entries)) for one in found] == [(str(path), 0), ("shipped", 19)]
        assert found[1].table.entries == table.entries
    with pytest.raises(UsageError, match=r"a GPU '\.\./h'; there are test_gpu_3000\. Run `quantkit tune`"):
        named_tables("../h", KERNELS)
    for text, why in {
        "": "the file is empty",
        "{}": "'gpu' of the file is None",
        '{"gpu": {"name": "a"}}': "'capability' of 'gpu' is None",
        '{"gpu": {"name": "a", "capability": [9, "0"]}}': "expected two integers",
    }.items():
        path.write_text(text)
        with pytest.raises(KernelError, match=why):
            named_tables(gpu.name, KERNELS)


def test_the_time_of_a_token_is_that_of_the_first_table_that_has_it(table: TileTable) -> None:
    key, entry = next((key, entry) for key, entry in table.entries.items() if key.m == 1)
    faster = replace(table, entries={key: replace(entry, us=0.5)})
    asked = (key.scheme, key.n, key.k, key.dtype)
    assert time_of([table, faster], *asked) == entry.us
    assert time_of([replace(table, entries={}), faster], *asked) == 0.5
    assert time_of([table], key.scheme, key.n + 1, key.k, key.dtype) is None
    assert time_of([], *asked) is None


def test_every_shipped_table_is_whole() -> None:
    for path in (Path(store.__file__).parent).glob("*.json"):
        gpu = json.loads(path.read_bytes())["gpu"]
        found = Gpu(gpu["name"], tuple(gpu["capability"]), gpu["multiprocessors"], 227 << 10)
        assert path.name == file_name(found)
        assert from_json(path.read_bytes(), found, KERNELS).entries


def test_what_cannot_be_read_is_left_out(
    table: TileTable, gpu: Gpu, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(table, KERNELS)
    path.unlink()
    os.mkfifo(path)
    with caplog.at_level(logging.WARNING):
        assert stored_tables(gpu, KERNELS) == ()
    assert "cannot be read and is not used: not a regular file (EINVAL)" in caplog.text


def test_a_table_that_is_too_large(table: TileTable, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(table, KERNELS)
    monkeypatch.setattr(store, "MAX_BYTES", path.stat().st_size)
    assert len(stored_tables(gpu, KERNELS)) == 1
    monkeypatch.setattr(store, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(KernelError, match=r"has more than the \d+ bytes it may have. Delete it"):
        stored_tables(gpu, KERNELS)


@pytest.mark.fault(71)
@pytest.mark.parametrize("call", ["pwrite", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_table(
    table: TileTable, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = save(table, KERNELS)
    before = path.read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(
        OutputError, match=rf"cannot write the tile table {path}: No space left .*XDG_CACHE_HOME"
    ):
        save(replace(table, entries={}), KERNELS)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_cache_that_is_no_directory(table: TileTable, gpu: Gpu, cache: Path) -> None:
    (cache / "quantkit").write_text("")
    assert stored_tables(gpu, KERNELS) == ()
    with pytest.raises(OutputError, match=r"cannot write the tile table .*Make its directory writable"):
        save(table, KERNELS)


def test_a_table_from_before_a_kernel_was_added_is_read(table: TileTable, gpu: Gpu) -> None:
    """A new kernel is a row of `KERNELS`, and no edit of tables."""
    older = [kernel for kernel in KERNELS if kernel.name != "fused-wgmma"]
    assert from_json(to_json(table, older), gpu, KERNELS) == table
    without = damage(lambda data: data["tiles"].pop("fused-portable"))
    with pytest.raises(KernelError, match="names the row 'fused-portable'; known are fused-gemv"):
        from_json(without(to_json(table, KERNELS)), gpu, KERNELS)

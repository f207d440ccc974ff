"""Tile table of one GPU: the fastest kernel and tile (launch configuration) per problem, and its JSON.

    {"version": 14,
     "gpu": {"name": "NVIDIA H200", "capability": [9, 0], "multiprocessors": 132},
     "made_with": {"quantkit": "0.1.0", "torch": "2.11.0", "triton": "3.6.0"},
     "tiles": {"fused-portable-gemv": ["warps", "columns", "row_tiles", "prefetch", "unroll", ...], ...},
     "weights": [
      {"scheme": {...}, "dtype": "bfloat16", "fp16_accumulation": false, "shapes": {
        "4096x14336": {"1": [12.4, "fused-portable-gemv", [4, 256, 1, true, 16, false, false]],
                       "32": [19.7, "fused-portable", [4, 32, 4, 4, 4, false, 1, 0],
                              {"fused-portable-gemv": 31.5}], ...}}}]}

A shape is N x K on one line. Its keys are M, powers of two: an entry is for up to M rows of x. A value is
microseconds, the kernel, its tile if it has one, and microseconds of the kernels before it in `KERNELS`.
Activations have `dtype`, and sums may be float16 with `fp16_accumulation`. Every value is checked, as a table
may come from anyone.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from quantkit.errors import FormatError, KernelError
from quantkit.files import parse_json, shown
from quantkit.kernels.problem import ACTIVATION_DTYPES, GPU_FEATURES, Gpu, Kernel, Problem, tile_text
from quantkit.packing.schemes import Scheme

#: Version of the format and of the kernels: tables of another version are not used.
VERSION = 14
#: Largest M of a bucket.
MAX_M = 1 << 16
#: Largest N and K.
MAX_SIDE = 1 << 24

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in ACTIVATION_DTYPES}
_SHAPE = re.compile(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})")


@dataclass(frozen=True)
class Key:
    """Key of an entry of a tile table: a weight [n, k] of `scheme`, and up to `m` rows of x, a power of two.

    x has `dtype`. `fp16_accumulation` is True if sums may be float16.
    """

    scheme: Scheme
    dtype: torch.dtype
    n: int
    k: int
    m: int
    fp16_accumulation: bool = False

    @classmethod
    def of(cls, problem: Problem) -> "Key":
        """Return the key of the table entry for a problem: its rows of x are rounded up to a power of two."""
        scheme, m = as_computed(problem.scheme, problem.k), bucket(problem.m)
        return cls(scheme, problem.dtype, problem.n, problem.k, m, problem.fp16_accumulation)


@dataclass(frozen=True)
class Entry:
    """Entry of a tile table: the name of the fastest kernel for a `Key`, its tile, and its time.

    us       microseconds per product
    tile     launch configuration; None for a kernel without tiles
    others   microseconds of the kernels that come before the fastest in `KERNELS`, by name
    """

    us: float
    kernel: str
    tile: Any = None
    others: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.kernel if self.tile is None else f"{self.kernel} {tile_text(self.tile)}"


@dataclass(frozen=True)
class TileTable:
    """Tile table: the measured entries of one GPU, and the versions they were measured with."""

    gpu: Gpu
    made_with: Mapping[str, str]
    entries: Mapping[Key, Entry]

    def with_more_rows(self, key: Key) -> Iterator[Key]:
        """Yield the keys that the table has for the same weight and larger M, smallest first."""
        m = 2 * key.m
        while m <= MAX_M:
            more = replace(key, m=m)
            if more in self.entries:
                yield more
            m *= 2

    def with_entries(self, entries: Mapping[Key, Entry]) -> "TileTable":
        """Return the table with `entries` added or replaced."""
        return replace(self, entries={**self.entries, **entries})


class OtherTable(Exception):
    """A valid table is of another version or for another GPU than requested."""


def bucket(m: int) -> int:
    """Return m rounded up to a power of two: all m with the same result share an entry of a table."""
    return 1 << (m - 1).bit_length()


def as_computed(scheme: Scheme, k: int) -> Scheme:
    """Return `scheme` as tables store it: properties on which no kernel with tiles depends have defaults.

    These are packing, column scales, rounding of x, and scales of a whole tensor or of several rows, which
    kernel layouts store for each row. `k` is the number of columns of the weight.
    """
    scheme = replace(scheme.of_weights.for_columns(k), packing="bits", column_scale=False, group_rows=1)
    return replace(scheme, group_size=None) if scheme.per_tensor else scheme


def time_of(
    tables: Iterable["TileTable"], scheme: Scheme, n: int, k: int, dtype: torch.dtype
) -> float | None:
    """Return measured microseconds of one row of x times a weight [n, k], from the first table that has it.

    `dtype` is that of x. None if no table has it.
    """
    key = Key(as_computed(scheme, k), dtype, n, k, 1)
    return next((table.entries[key].us for table in tables if key in table.entries), None)


def to_json(table: TileTable, kernels: Iterable[Kernel]) -> bytes:
    """Return the contents of a table's file, sorted, with a line per weight and shape for small diffs.

    `kernels` are the kernels that tables may name; a table stores the fields of their tiles.
    """
    tiles = {kernel.name: _fields(kernel) for kernel in kernels if kernel.tile_space is not None}
    weights: dict[str, dict[tuple[int, int], dict[int, list[Any]]]] = {}
    for key, entry in table.entries.items():
        tile = [] if entry.tile is None else [[getattr(entry.tile, name) for name in tiles[entry.kernel]]]
        other_times = {name: _rounded(us) for name, us in sorted(entry.others.items())}
        by_m = weights.setdefault(_weight_to_json(key), {}).setdefault((key.n, key.k), {})
        by_m[key.m] = [_rounded(entry.us), entry.kernel, *tile, *([other_times] if other_times else [])]
    groups = []
    for weight, shapes in sorted(weights.items()):
        lines = [
            f'"{n}x{k}": {json.dumps({str(m): value for m, value in sorted(by_m.items())})}'
            for (n, k), by_m in sorted(shapes.items())
        ]
        groups.append(f'{{{weight}, "shapes": {{\n' + ",\n".join(lines) + "\n}}")
    head = {
        "version": VERSION,
        "gpu": _gpu_to_json(table.gpu),
        "made_with": dict(sorted(table.made_with.items())),
        "tiles": tiles,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    return ("{\n" + "\n".join(lines) + '\n"weights": [\n' + ",\n".join(groups) + "\n]\n}\n").encode()


def _weight_to_json(key: Key) -> str:
    """Return the fields scheme, dtype and fp16_accumulation of `key` as JSON text without the outer braces.

    `to_json` groups entries by this text, and adds the field "shapes" to the same object.
    """
    dtype = str(key.dtype).removeprefix("torch.")
    return json.dumps(
        {"scheme": key.scheme.to_dict(), "dtype": dtype, "fp16_accumulation": key.fp16_accumulation}
    )[1:-1]


def _rounded(us: float) -> float:
    return float(f"{us:.4g}")


def _gpu_to_json(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "capability": list(gpu.capability),
        "multiprocessors": gpu.multiprocessors,
    }


def _fields(kernel: Kernel) -> list[str]:
    return [] if kernel.tile_space is None else [field.name for field in fields(kernel.tile_space.record)]


def gpu_in(data: bytes) -> Gpu:
    """Return the GPU that `data`, a table's file, names.

    Its shared memory, which a table does not state, is `sys.maxsize`. Raises `KernelError` for a file that is
    no table of these kernels.
    """
    try:
        table = parse_json(data, "the file")
        found = _get(table, "gpu", dict, "the file")
        name, capability = _get(found, "name", str, "'gpu'"), _get(found, "capability", list, "'gpu'")
        if len(capability) != 2 or not all(type(number) is int for number in capability):
            raise ValueError(f"'capability' of 'gpu' is {shown(capability)}; expected two integers")
        multiprocessors = _get(found, "multiprocessors", int, "'gpu'")
    except ValueError as error:
        raise KernelError(str(error)) from None
    return Gpu(name, (capability[0], capability[1]), multiprocessors, sys.maxsize)


def from_json(data: bytes, gpu: Gpu, kernels: Iterable[Kernel]) -> TileTable:
    """Parse `data`, a table for `gpu` written by `to_json`; `kernels` are the kernels that it may name.

    Raises `OtherTable` for another version or GPU, and `KernelError` for any other fault, with what was found
    and expected.
    """
    try:
        return _table(parse_json(data, "the file"), gpu, {kernel.name: kernel for kernel in kernels})
    except (ValueError, FormatError) as error:
        raise KernelError(str(error)) from None


def _table(data: Mapping[str, Any], gpu: Gpu, kernels: Mapping[str, Kernel]) -> TileTable:
    version = _get(data, "version", int, "the file")
    fields_of = {kernel.name: _fields(kernel) for kernel in kernels.values() if kernel.tile_space is not None}
    if version != VERSION:
        raise OtherTable(f"it has version {shown(version)}, these kernels have {VERSION}")
    _only(data, ("version", "gpu", "made_with", "tiles", "weights"), "the file")
    found, own = _get(data, "gpu", dict, "the file"), _gpu_to_json(gpu)
    _only(found, tuple(own), "'gpu'")
    if found != own:
        raise OtherTable(f"it is for {shown(found)}, this is {own}")
    made_with = _get(data, "made_with", dict, "the file")
    if not all(type(version) is str and len(version) <= 100 for version in made_with.values()):
        raise ValueError(f"'made_with' is {shown(made_with)}; expected versions by name")
    tiles = _get(data, "tiles", dict, "the file")
    # A table older than a kernel has neither fields nor entries for it.
    kernels = {name: one for name, one in kernels.items() if one.tile_space is None or name in tiles}
    expected = {name: names for name, names in fields_of.items() if name in tiles}
    if tiles != expected:
        raise ValueError(f"'tiles' is {shown(tiles)}; expected {expected}")
    entries: dict[Key, Entry] = {}
    for group in _get(data, "weights", list, "the file"):
        for problem, value in _problems(group, gpu):
            key = Key.of(problem)
            if key.scheme != problem.scheme:
                raise ValueError(f"the scheme of {problem} should be {key.scheme}")
            if key in entries:
                raise ValueError(f"{problem} occurs twice; expected once")
            entries[key] = _entry(value, problem, kernels)
    return TileTable(gpu, made_with, entries)


def _problems(group: Any, gpu: Gpu) -> Iterator[tuple[Problem, Any]]:
    """Yield (problem on `gpu`, its entry as parsed JSON) for all shapes and M in `group`.

    `group` is an object of the list "weights" in a table's file. Raises `ValueError` if it is malformed.
    """
    if type(group) is not dict:
        raise ValueError(f"'weights' has {shown(group)}; expected an object")
    _only(group, ("scheme", "dtype", "fp16_accumulation", "shapes"), "a weight")
    scheme = Scheme.from_dict(_get(group, "scheme", dict, "a weight"))
    dtype = _get(group, "dtype", str, str(scheme))
    if dtype not in _DTYPES:
        raise ValueError(f"the dtype of {scheme} is {shown(dtype)}; expected {', '.join(_DTYPES)}")
    fp16_accumulation = _get(group, "fp16_accumulation", bool, str(scheme))
    if fp16_accumulation and dtype != "float16":
        raise ValueError(f"'fp16_accumulation' of {scheme} is true for {dtype}; expected only for float16")
    for shape, by_m in _get(group, "shapes", dict, str(scheme)).items():
        n, k = _sides(shape, scheme)
        if type(by_m) is not dict:
            raise ValueError(f"{scheme} {shape} is {shown(by_m)}; expected an object")
        for m, value in by_m.items():
            yield (
                Problem(
                    _m(m), n, k, scheme, _DTYPES[dtype], "cuda", GPU_FEATURES, None, gpu, fp16_accumulation
                ),
                value,
            )


def _entry(value: Any, problem: Problem, kernels: Mapping[str, Kernel]) -> Entry:
    what = f"the entry of {problem}"
    if type(value) is not list or len(value) < 2:
        raise ValueError(f"{what} is {shown(value)}; expected [microseconds, row, ...]")
    us, name, *rest = value
    kernel = kernels.get(name) if type(name) is str else None
    if kernel is None or "cuda" not in kernel.devices:
        known = ", ".join(kernel.name for kernel in kernels.values() if "cuda" in kernel.devices)
        raise ValueError(f"{what} names the row {shown(name)}; known are {known}")
    tile = None
    if kernel.tile_space is not None:
        tile = _tile(rest.pop(0) if rest else None, kernel, problem, what)
    other_times = rest.pop(0) if rest and type(rest[0]) is dict else {}
    if rest:
        raise ValueError(f"{what} has {shown(rest)} at its end; expected nothing more")
    for other in other_times:
        if other not in kernels:
            raise ValueError(f"{what} names the row {shown(other)}; known are {', '.join(kernels)}")
    return Entry(_us(us, what), name, tile, {other: _us(us, what) for other, us in other_times.items()})


def _tile(values: Any, kernel: Kernel, problem: Problem, what: str) -> Any:
    assert kernel.tile_space is not None
    names = fields(kernel.tile_space.record)
    if type(values) is not list or [type(value) for value in values] != [name.type for name in names]:
        raise ValueError(
            f"{what} has the tile {shown(values)}; expected {', '.join(name.name for name in names)}"
        )
    tile = kernel.tile_space.record(*values)
    reason = kernel.why_unsupported(problem) or kernel.tile_space.why_invalid(problem, tile)
    if reason is not None:
        raise ValueError(f"{what} has the tile {values} for {kernel.name}, which cannot be: {reason}")
    return tile


def _us(value: Any, what: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{what} has {shown(value)}; expected microseconds")
    return float(value)


def _sides(shape: str, scheme: Scheme) -> tuple[int, int]:
    match = _SHAPE.fullmatch(shape)
    if match is None or max(int(side) for side in match.groups()) > MAX_SIDE:
        raise ValueError(f"{scheme} has the shape {shown(shape)}; expected NxK such as 4096x14336")
    return int(match[1]), int(match[2])


def _m(text: str) -> int:
    m = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= m <= MAX_M or bucket(m) != m or str(m) != text:
        raise ValueError(f"M is {shown(text)}; expected a power of two up to {MAX_M}")
    return m


def _get(data: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    value = data.get(key)
    if type(value) is not kind:
        raise ValueError(f"{key!r} of {where} is {shown(value)}; expected {_KINDS[kind]}")
    return value


_KINDS = {int: "an integer", bool: "true or false", str: "a text", dict: "an object", list: "a list"}


def _only(data: Mapping[str, Any], allowed: tuple[str, ...], where: str) -> None:
    unknown = set(data) - set(allowed)
    if unknown:
        raise ValueError(f"{where} has the keys {shown(sorted(unknown))}; expected {', '.join(allowed)}")

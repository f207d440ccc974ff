"""Read and write files of tile tables: those that ship with quantkit, and the user's, which wins."""

import logging
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files as package_files
from importlib.resources.abc import Traversable
from pathlib import Path

from quantkit.errors import KernelError, OutputError, UsageError
from quantkit.files import open_regular, os_error_text, replace_file, user_cache
from quantkit.kernels.problem import Gpu, Kernel
from quantkit.kernels.tuning.tile_table import OtherTable, TileTable, from_json, gpu_in, to_json

#: Environment variable; `none` leaves tiles to the rules.
TILES_VARIABLE = "QUANTKIT_TILES"
#: Largest file in bytes. A table with every format and 40 shapes has about 1 MB.
MAX_BYTES = 16 << 20
_REMEDY = "Delete it, or run `quantkit tune`."

logger = logging.getLogger("quantkit.kernels")


@dataclass(frozen=True)
class StoredTable:
    """Tile table, and where it is from.

    `source` is text for messages: the path of a user's table, or "shipped", or "shipped, measured on <GPU>".
    """

    table: TileTable
    source: str


def stored_tables(gpu: Gpu, kernels: Iterable[Kernel]) -> tuple[StoredTable, ...]:
    """Return the tile tables for `gpu`, the user's first, then shipped ones; none if `QUANTKIT_TILES=none`.

    `kernels` are all kernels that a table may name. Raises `KernelError` for a damaged table. Unreadable
    tables, and tables of another GPU or version, are skipped with a warning.
    """
    if os.environ.get(TILES_VARIABLE) == "none":
        return ()
    kernels = tuple(kernels)
    path = user_path(gpu)
    users = None if path is None else _parsed(_read(path), str(path), gpu, kernels)
    found = () if users is None else (StoredTable(users, str(path)),)
    return (*found, *(StoredTable(one, _shipped_for(gpu, one)) for one in shipped_tables(gpu, kernels)))


def _shipped_for(gpu: Gpu, table: TileTable) -> str:
    """Return the `source` of a shipped table: "shipped", and "measured on <GPU>" if that is not `gpu`."""
    elsewhere = "" if table.gpu.name == gpu.name else f", measured on {table.gpu.name}"
    return f"shipped{elsewhere}"


def named_tables(name: str, kernels: Iterable[Kernel]) -> tuple[StoredTable, ...]:
    """Return the tile tables of the GPU called `name`, which need not be in this machine; the user's first.

    `name` may also be the file name of a table without ".json". `kernels` are all kernels that a table may
    name. `QUANTKIT_TILES` is ignored. Raises `UsageError` with the names of all tables if there is none, and
    `KernelError` for a damaged table.
    """
    kernels = tuple(kernels)
    file, cache = f"{table_name(name)}.json", user_cache()
    users = None if cache is None else cache / "tiles" / file
    shipped = _shipped() / file
    found = {
        str(users): None if users is None else _read(users),
        "shipped": shipped.read_bytes() if shipped.is_file() else None,
    }
    parsed = {source: _parsed(data, source, None, kernels) for source, data in found.items()}
    tables = tuple(StoredTable(table, source) for source, table in parsed.items() if table is not None)
    if not tables:
        files = {one.name for one in _shipped().iterdir() if one.name.endswith(".json")}
        if users is not None and users.parent.is_dir():
            files |= {one.name for one in users.parent.iterdir() if one.suffix == ".json"}
        names = ", ".join(sorted(one.removesuffix(".json") for one in files)) or "none"
        raise UsageError(
            f"there is no table of measured times for a GPU {name!r}; there are {names}. Run `quantkit tune` "
            "where that GPU is, and copy the table that it writes."
        )
    return tables


def shipped_tables(gpu: Gpu, kernels: Iterable[Kernel]) -> tuple[TileTable, ...]:
    """Return the shipped tables for a GPU: its own, then, in order of names, those of similar GPUs.

    `kernels` are all kernels that a table may name. Similar means the same compute capability and number of
    multiprocessors. Such GPUs differ in memory bandwidth, which hardly affects the fastest tiles. H100 with
    the H200's table, 355 products of Llama-3 8B: 0.95 to 1.00 of the time without a table for M up to 16,
    0.86 at M = 64.
    """
    kernels, own = tuple(kernels), file_name(gpu)
    found = []
    for file in sorted(_shipped().iterdir(), key=lambda one: (one.name != own, one.name)):
        if not file.name.endswith(".json") or not file.is_file():
            continue
        data = file.read_bytes()
        if file.name == own:
            found.append(_parsed(data, "shipped", gpu, kernels))
            continue
        like = _gpu_in(data, str(file))
        if (like.capability, like.multiprocessors) == (gpu.capability, gpu.multiprocessors):
            # Tiles too large for this GPU's shared memory are refused when they are selected.
            found.append(_parsed(data, str(file), None, kernels))
    return tuple(table for table in found if table is not None)


def user_table(gpu: Gpu, kernels: Iterable[Kernel]) -> TileTable | None:
    """Return the table for `gpu` in the user's cache, whatever `QUANTKIT_TILES` says.

    `kernels` are all kernels that a table may name. None if there is no table, or one of another version.
    Raises `KernelError` for a damaged table, and `OutputError` without a home directory.
    """
    path = _user_path_or_error(gpu)
    return _parsed(_read(path), str(path), gpu, tuple(kernels))


def _shipped() -> Traversable:
    return package_files("quantkit.kernels.tuning.tables")


def _parsed(
    data: bytes | None, source: str, gpu: Gpu | None, kernels: tuple[Kernel, ...]
) -> TileTable | None:
    """Parse `data`, read from `source`, as a table for `gpu`; if `gpu` is None, for the GPU in `data`.

    `kernels` are all kernels that the table may name. Returns None if there is no file (`data` None), and,
    with a warning, if the table is for another GPU or version. Raises `KernelError` for a damaged table.
    """
    if data is None:
        return None
    gpu = gpu or _gpu_in(data, source)
    try:
        return from_json(data, gpu, kernels)
    except OtherTable as error:
        logger.warning("the tile table %s is not used: %s. %s", source, error, _REMEDY)
        return None
    except KernelError as error:
        raise _damaged(source, error) from None


def _gpu_in(data: bytes, source: str) -> Gpu:
    try:
        return gpu_in(data)
    except KernelError as error:
        raise _damaged(source, error) from None


def _damaged(source: str, error: KernelError) -> KernelError:
    return KernelError(f"the tile table {source} is damaged: {error}. {_REMEDY}")


def save(table: TileTable, kernels: Iterable[Kernel]) -> Path:
    """Write `table` to the user's cache atomically and return its path; raise `OutputError` if that fails.

    `kernels` are all kernels that a table may name.
    """
    path = _user_path_or_error(table.gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, to_json(table, kernels))
    except OSError as error:
        raise OutputError(
            f"cannot write the tile table {path}: {os_error_text(error)}. Make its directory writable, or "
            "set XDG_CACHE_HOME to one that is."
        ) from error
    return path


def file_name(gpu: Gpu) -> str:
    """Return the file name of a GPU's table: `nvidia_h200.json` for NVIDIA H200."""
    return f"{table_name(gpu.name)}.json"


def table_name(gpu: str) -> str:
    """Return the name of a GPU's tables: `nvidia_h200` for NVIDIA H200."""
    return (re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") or "gpu")[:100]


def user_path(gpu: Gpu) -> Path | None:
    """Return the path of the table of `gpu` in the user's cache; None without a home directory."""
    cache = user_cache()
    return None if cache is None else cache / "tiles" / file_name(gpu)


def _user_path_or_error(gpu: Gpu) -> Path:
    path = user_path(gpu)
    if path is None:
        raise OutputError(
            "there is no home directory to keep a tile table in. Set XDG_CACHE_HOME to a directory."
        )
    return path


def _read(path: Path) -> bytes | None:
    try:
        with open_regular(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        logger.warning(
            "the tile table %s cannot be read and is not used: %s. %s", path, os_error_text(error), _REMEDY
        )
        return None
    if len(data) > MAX_BYTES:
        raise KernelError(f"the tile table {path} has more than the {MAX_BYTES} bytes it may have. {_REMEDY}")
    return data

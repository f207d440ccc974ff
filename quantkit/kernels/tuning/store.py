"""Where tile tables are: those that ship with quantkit, and one in the user's cache, which wins."""

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
from quantkit.kernels.problem import Gpu, KernelRow
from quantkit.kernels.tuning.tile_table import OtherTable, TileTable, from_json, gpu_in, to_json

#: `none` leaves the choice of tiles to the rules.
TILES_VARIABLE = "QUANTKIT_TILES"
#: Tables are no larger. One with every format and forty shapes has about 1 MB.
MAX_BYTES = 16 << 20
_REMEDY = "Delete it, or run `quantkit tune`."

logger = logging.getLogger("quantkit.kernels")


@dataclass(frozen=True)
class StoredTable:
    """A table and where it came from: a path, or "shipped", and the GPU if it was measured on another."""

    table: TileTable
    source: str


def stored_tables(gpu: Gpu, rows: Iterable[KernelRow]) -> tuple[StoredTable, ...]:
    """The tables for `gpu`, the user's before those that ship; none if `QUANTKIT_TILES=none`.

    A table that is damaged is a `KernelError`. One for another GPU or version, or one that cannot be read,
    is left out with a warning.
    """
    if os.environ.get(TILES_VARIABLE) == "none":
        return ()
    rows = tuple(rows)
    path = user_path(gpu)
    users = None if path is None else _parsed(_read(path), str(path), gpu, rows)
    found = () if users is None else (StoredTable(users, str(path)),)
    return (*found, *(StoredTable(one, _shipped_for(gpu, one)) for one in shipped_tables(gpu, rows)))


def _shipped_for(gpu: Gpu, table: TileTable) -> str:
    elsewhere = "" if table.gpu.name == gpu.name else f", measured on {table.gpu.name}"
    return f"shipped{elsewhere}"


def named_tables(name: str, rows: Iterable[KernelRow]) -> tuple[StoredTable, ...]:
    """The tables of a GPU that need not be here, by its name or that of the file, the user's first, whatever
    `QUANTKIT_TILES` says.

    `UsageError` with the names there are if there is none. A table that is damaged is a `KernelError`.
    """
    rows = tuple(rows)
    file, cache = f"{table_name(name)}.json", user_cache()
    users = None if cache is None else cache / "tiles" / file
    shipped = _shipped() / file
    found = {
        str(users): None if users is None else _read(users),
        "shipped": shipped.read_bytes() if shipped.is_file() else None,
    }
    parsed = {source: _parsed(data, source, None, rows) for source, data in found.items()}
    tables = tuple(StoredTable(table, source) for source, table in parsed.items() if table is not None)
    if not tables:
        known = {one.name for one in _shipped().iterdir() if one.name.endswith(".json")}
        if users is not None and users.parent.is_dir():
            known |= {one.name for one in users.parent.iterdir() if one.suffix == ".json"}
        names = ", ".join(sorted(one.removesuffix(".json") for one in known)) or "none"
        raise UsageError(
            f"there is no table of measured times for a GPU {name!r}; there are {names}. Run `quantkit tune` "
            "where that GPU is, and copy the table that it writes."
        )
    return tables


def shipped_tables(gpu: Gpu, rows: Iterable[KernelRow]) -> tuple[TileTable, ...]:
    """The tables that ship with quantkit for a GPU: its own, and then, by name, those for GPUs that are like
    it, as `TileTable.gpu` says: of its compute capability, with as many multiprocessors.

    Such GPUs differ in how fast they read memory, which kernels wait for in the same tiles: on an H100 the
    table of the H200 takes 0.95 to 1.00 of the time of the rules up to 16 rows of x, 0.86 with 64 (355
    products of Llama-3 8B).
    """
    rows, own = tuple(rows), file_name(gpu)
    found = []
    for file in sorted(_shipped().iterdir(), key=lambda one: (one.name != own, one.name)):
        if not file.name.endswith(".json") or not file.is_file():
            continue
        data = file.read_bytes()
        if file.name == own:
            found.append(_parsed(data, "shipped", gpu, rows))
            continue
        like = _gpu_in(data, str(file))
        if (like.capability, like.multiprocessors) == (gpu.capability, gpu.multiprocessors):
            # Tiles that are too large for this GPU's memory are refused when they are chosen.
            found.append(_parsed(data, str(file), None, rows))
    return tuple(table for table in found if table is not None)


def user_table(gpu: Gpu, rows: Iterable[KernelRow]) -> TileTable | None:
    """The table in the user's cache, whatever `QUANTKIT_TILES` says; None where there is none that fits."""
    path = _user_path_or_error(gpu)
    return _parsed(_read(path), str(path), gpu, tuple(rows))


def _shipped() -> Traversable:
    return package_files("quantkit.kernels.tuning.tables")


def _parsed(
    data: bytes | None, source: str, gpu: Gpu | None, rows: tuple[KernelRow, ...]
) -> TileTable | None:
    """The table of a file, for `gpu` or for whatever GPU it is for; None where there is none."""
    if data is None:
        return None
    gpu = gpu or _gpu_in(data, source)
    try:
        return from_json(data, gpu, rows)
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


def save(table: TileTable, rows: Iterable[KernelRow]) -> Path:
    """Write the user's table in one step; `OutputError` says what is in the way."""
    path = _user_path_or_error(table.gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, to_json(table, rows))
    except OSError as error:
        raise OutputError(
            f"cannot write the tile table {path}: {os_error_text(error)}. Make its directory writable, or "
            "set XDG_CACHE_HOME to one that is."
        ) from error
    return path


def file_name(gpu: Gpu) -> str:
    """`nvidia_h200.json` for NVIDIA H200."""
    return f"{table_name(gpu.name)}.json"


def table_name(gpu: str) -> str:
    """The name of the tables of a GPU: `nvidia_h200` for NVIDIA H200."""
    return (re.sub(r"[^a-z0-9]+", "_", gpu.lower()).strip("_") or "gpu")[:100]


def user_path(gpu: Gpu) -> Path | None:
    """The file in the user's cache; None where there is no home directory to have one in."""
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

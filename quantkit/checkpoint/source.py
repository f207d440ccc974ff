"""Open a checkpoint directory: check its files, and read its tensors a few rows at a time."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from quantkit.checkpoint.low_bit.static_scales import ActivationTensors
from quantkit.checkpoint.output.atomic_write import is_inside
from quantkit.checkpoint.safetensors_header import read_header, read_json
from quantkit.checkpoint.side_names import is_side_name
from quantkit.checkpoint.stamp import FileStamp
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError, EnvironmentProblem
from quantkit.files import open_regular, os_error_text, shown

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ADAPTER_NAME = "adapter_config.json"
HEADERS_ONLY_NAME = ".quantkit-headers-only"

#: An index has a line per tensor. A config does not, and transformers copies it many times.
MAX_CONFIG_BYTES = 16 * 2**20

_SHARD_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}\.safetensors")
_READ_BYTES = 2**30  # One system call reads at most 2**31 - 4096 bytes on Linux.

# Remedy for unusable weight files, by suffix; the first that exists counts.
_UNPICKLE = (
    "quantkit never unpickles weights. Convert them with transformers: "
    "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR)"
)
_WEIGHTS_REMEDIES = {
    ".safetensors": f"Download {INDEX_NAME} as well",
    **dict.fromkeys((".bin", ".pt", ".pth", ".ckpt"), _UNPICKLE),
    ".gguf": "Give the path of the GGUF file itself, as in `quantkit convert MODEL.gguf OUT`",
}


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoint directory whose config, index and tensor headers were read and checked.

    tensors        ordered by shard name, then by offset in the shard
    side_files     files that a copy carries unchanged: tokenizer, generation config, license
    stamps         size and times of side files, config, index and shards when the checkpoint was opened
    headers_only   True for a download without tensor data: everything works but `read`
    notes          how tensors are read, for the plan
    derived        files made from the shards when the checkpoint was opened
    uncut          tensors that can be read although `tensors` has slices of them instead
    activations    stored scales of activations, which `tensors` does not have
    """

    directory: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    shards: tuple[Path, ...]
    side_files: tuple[Path, ...]
    warnings: tuple[str, ...]
    stamps: Mapping[Path, FileStamp]
    headers_only: bool = False
    notes: tuple[str, ...] = ()
    derived: frozenset[Path] = frozenset()
    uncut: Mapping[str, StoredTensor] = field(default_factory=dict)
    activations: ActivationTensors = field(default_factory=ActivationTensors)

    @classmethod
    def open(cls, directory: Path, *, strict: bool = False, allow_auto_map: bool = False) -> "Checkpoint":
        """Read config, index and headers of `directory`, but no tensor data.

        A tensor missing from the index is a warning, or with `strict` an error. A config that asks for remote
        code (`auto_map`) is an error; with `allow_auto_map` the key is dropped from `config`. The code never
        runs. Raises `CheckpointError` for any fault of the files, `EnvironmentProblem` on a big-endian host.
        """
        if sys.byteorder != "little":
            raise EnvironmentProblem(
                f"this host is {sys.byteorder}-endian, and safetensors data is little-endian; "
                "expected a little-endian host. Run quantkit on x86-64 or ARM64."
            )
        directory = directory.absolute()
        with examining(directory):
            return cls._open(directory, strict, allow_auto_map)

    @classmethod
    def _open(cls, directory: Path, strict: bool, allow_auto_map: bool) -> "Checkpoint":
        entries = _entries(directory)
        _check_no_adapter(directory, entries)
        config, warnings = _read_config(directory, allow_auto_map)
        index = _read_index(directory, entries)
        shards, shard_warnings = _find_shards(directory, entries, index)
        side_files, side_warnings = _find_side_files(entries)
        _check_case([directory / CONFIG_NAME, *shards, *side_files])
        index_files = [] if index is None else [directory / INDEX_NAME]
        # Stamps are taken before the headers are read, so that a change in between is noticed.
        stamped = (directory / CONFIG_NAME, *index_files, *shards, *side_files)
        stamps = {path: FileStamp.of(path) for path in stamped}
        tensors = _merge([read_header(shard) for shard in shards])
        if index is not None:
            warnings += _compare(directory / INDEX_NAME, index, tensors, strict)
        return cls(
            directory=directory,
            config=config,
            tensors=tensors,
            shards=tuple(shards),
            side_files=tuple(side_files),
            warnings=(*warnings, *shard_warnings, *side_warnings),
            stamps=stamps,
            headers_only=directory / HEADERS_ONLY_NAME in entries,
        )

    @classmethod
    def of_files(cls, files: Sequence[Path]) -> "Checkpoint":
        """Open safetensors files of one directory, without config, index or side files."""
        stamps = {path: FileStamp.of(path) for path in files}
        tensors = _merge([read_header(path) for path in files])
        return cls(files[0].parent, {}, tensors, tuple(files), (), (), stamps)

    @property
    def place(self) -> Path:
        """Return the path that the user gave: the directory, or the GGUF file."""
        return self.shards[0] if self.derived else self.directory

    @property
    def is_quantized(self) -> bool:
        """Return True if config.json says that some weights are packed, by any tool."""
        return "quantization_config" in self.config

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all tensors; shared bytes count once."""
        return sum(nbytes for *_, nbytes in {tensor.location for tensor in self.tensors.values()})

    def read(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read rows `[start, stop)` along the first dimension, by default all, as a new CPU tensor.

        Thread-safe. Raises `CheckpointError` if there is no such tensor, the file has changed since it was
        opened, or it ends early; `IndexError` for rows outside the tensor.
        """
        tensor = self._tensor(name)
        rows = tensor.shape[0] if tensor.shape else 1
        stop = rows if stop is None else stop
        if not 0 <= start <= stop <= rows or (not tensor.shape and start == stop):
            raise IndexError(f"tensor {name!r} has {rows} rows, not [{start}, {stop})")
        return tensor.values(self.read_stored, start, stop)

    def pieces(self, name: str, nbytes: int) -> Iterator[tuple[torch.Tensor, int]]:
        """Read a tensor in pieces of rows, of about `nbytes` bytes.

        Yields each piece, and the index of its first element in the flat tensor.
        """
        tensor = self._tensor(name)
        rows = tensor.shape[0] if tensor.shape else 1
        step = max(1, nbytes * rows // max(tensor.nbytes, 1))
        for start in range(0, rows, step):
            yield self.read(name, start, min(start + step, rows)), start * (tensor.elements // rows)

    def read_stored(
        self,
        tensor: StoredTensor,
        start: int = 0,
        stop: int | None = None,
        columns: tuple[int, int] | None = None,
    ) -> torch.Tensor:
        """Read stored rows, of a matrix also only some `columns`, as a CPU tensor: the `Read` of `values`.

        Raises `CheckpointError` if the file has changed since it was opened, or ends early, and for a
        download without tensor data.
        """
        if self.headers_only:
            problem = f"only the header was downloaded; expected the data of {tensor.name!r} as well"
            _fail(tensor.file, problem, "Download the whole checkpoint with `hf download`")
        rows = tensor.shape[0] if tensor.shape else 1
        stop = rows if stop is None else stop
        row_bytes = tensor.nbytes // rows
        inside = (0, row_bytes)
        if columns is not None:
            inside = (columns[0] * tensor.torch_dtype.itemsize, columns[1] * tensor.torch_dtype.itemsize)
        # A plain read: mapped pages would count as resident memory, and truncating a mapped file kills the
        # process with SIGBUS.
        data = torch.empty(stop - start, inside[1] - inside[0], dtype=torch.uint8)
        offset = tensor.offset + start * row_bytes + inside[0]
        got = _read_into(data, tensor.file, offset, row_bytes, self.stamps[tensor.file])
        if got < data.numel():
            found = f"expected {data.numel()} bytes of tensor {tensor.name!r}, got {got}"
            _fail(tensor.file, f"{found}: the file was truncated", "Download the file again")
        if tensor.torch_dtype == torch.bool and bool((data > 1).any()):
            found = f"tensor {tensor.name!r} has dtype BOOL and the byte {int(data.max())}"
            _fail(tensor.file, f"{found}; expected 0 or 1", "Write the file again")
        inner = tensor.shape[1:] if columns is None else (columns[1] - columns[0],)
        return data.flatten().view(tensor.torch_dtype).reshape((stop - start, *inner) if tensor.shape else ())

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self.tensors and name not in self.uncut:
            problem = f"there is no tensor {shown(name)} among its {len(self.tensors)} tensors"
            _fail(self.directory, problem, f"Check the name, or the architecture in {CONFIG_NAME}")
        return self.tensors.get(name) or self.uncut[name]

    def fingerprint(self, *, of_copies: bool = False) -> str:
        """Return the hex SHA-256 over names, sizes and times of config, index and shards.

        `of_copies` leaves out the change time, which differs in copies on another host. Inodes are left out
        because some file systems renumber them when mounted.
        """
        rows = sorted(
            (path.name, stamp.size, stamp.mtime_ns, 0 if of_copies else stamp.ctime_ns)
            for path, stamp in self.stamps.items()
            if path not in self.side_files and path not in self.derived
        )
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()

    @property
    def side_bytes(self) -> int:
        """Return the bytes of the side files."""
        return sum(self.stamps[path].size for path in self.side_files)

    def check_unchanged(self) -> None:
        """Raise `CheckpointError` if config, index, a shard or a side file changed since it was opened."""
        for path, stamp in self.stamps.items():
            stamp.check(path)


def _read_config(directory: Path, allow_auto_map: bool) -> tuple[dict[str, Any], list[str]]:
    path = directory / CONFIG_NAME
    _check_inside(path)
    config = read_json(path, MAX_CONFIG_BYTES)
    _check_no_kernels(path, config)
    if not config.get("auto_map"):
        return config, []
    if not allow_auto_map:
        _fail(
            path,
            f"auto_map is {shown(config['auto_map'])}, so the model needs code of its repository, "
            "which quantkit never runs; expected an architecture of transformers",
            "Remove auto_map, or use --allow-auto-map to ignore it, if transformers has the model; if not, "
            "quantize it with --model-free",
        )
    del config["auto_map"]
    return config, [f"{path}: auto_map is ignored; the code that it names is not run"]


def _check_no_kernels(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config that names a hub repository of attention kernels, which transformers would run."""
    pending: list[Mapping[str, Any]] = [config]
    while pending:
        node = pending.pop()
        for key, value in node.items():
            pending += [value] if isinstance(value, dict) else []
            names = value.values() if isinstance(value, dict) else [value]
            if "_implementation" in key and any(isinstance(name, str) and "/" in name for name in names):
                _fail(
                    path,
                    f"{key} is {shown(value)}, so the model would run code of that repository, which "
                    "quantkit never does; expected an implementation of transformers, such as sdpa",
                    f"Remove {key}",
                )


def _check_no_adapter(directory: Path, entries: Sequence[Path]) -> None:
    """Refuse adapters: with PEFT installed, transformers loads the base model that an adapter names."""
    path = directory / ADAPTER_NAME
    if path in entries:
        problem = "the directory is an adapter to another model; expected a model of its own"
        _fail(path, problem, f"Merge the adapter into its model, or remove {ADAPTER_NAME}")


def _read_index(directory: Path, entries: Sequence[Path]) -> dict[str, Any] | None:
    """Read the index with a checked `weight_map`; None if the directory has no index."""
    path = directory / INDEX_NAME
    if path not in entries:
        return None
    remedy = "Download the index again"
    _check_inside(path)
    index = read_json(path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        _fail(path, f"weight_map is {shown(weight_map)}; expected shard names by tensor", remedy)
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD_NAME.fullmatch(shard):
            problem = f"the shard of tensor {shown(name)} is {shown(shard)}; expected the name of"
            _fail(path, f"{problem} a file beside the index: [A-Za-z0-9._-]+.safetensors", remedy)
    return index


@contextmanager
def examining(directory: Path) -> Iterator[None]:
    """Context manager: raise errors of the disk as `CheckpointError`, unless handled more precisely."""
    try:
        yield
    except OSError as error:
        path = Path(error.filename or directory)
        _fail(path, f"cannot be examined: {os_error_text(error)}", "Check the disk and the permissions")


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        problem = f"cannot be listed ({error.strerror}); expected a directory with a checkpoint"
        _fail(directory, problem, "Check the path")


def _find_shards(
    directory: Path, entries: Sequence[Path], index: dict[str, Any] | None
) -> tuple[list[Path], list[str]]:
    present = [path.name for path in entries if path.suffix == ".safetensors"]
    if index is not None:
        names = sorted(set(index["weight_map"].values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            problem = f"{len(missing)} of the {len(names)} shards in {INDEX_NAME} are missing"
            _fail(directory, f"{problem}: {', '.join(missing)}", "Download them")
    elif SINGLE_NAME in present:
        names = [SINGLE_NAME]
    else:
        _fail_without_weights(directory, entries)
    for name in names:
        _check_inside(directory / name)
    unused = [name for name in present if name not in names]
    reason = f"{SINGLE_NAME} is used" if index is None else f"{INDEX_NAME} does not name them"
    warnings = [f"{directory}: ignored {', '.join(unused)}, because {reason}"] if unused else []
    return [directory / name for name in names], warnings


def _fail_without_weights(directory: Path, entries: Sequence[Path]) -> NoReturn:
    found = [path for path in entries if path.suffix in _WEIGHTS_REMEDIES]
    names = ", ".join(path.name for path in found) or "no weights"
    suffixes = {path.suffix for path in found}
    remedies = [remedy for suffix, remedy in _WEIGHTS_REMEDIES.items() if suffix in suffixes]
    remedy = remedies[0] if remedies else "Download the weights as well"
    _fail(directory, f"found {names}; expected {SINGLE_NAME} or {INDEX_NAME}", remedy)


def _find_side_files(entries: Sequence[Path]) -> tuple[list[Path], list[str]]:
    wanted = [path for path in entries if _is_side_file(path)]
    files = [path for path in wanted if is_inside(path)]
    outside = [path for path in wanted if path not in files]
    return files, [f"{path}: ignored, because it links out of the directory" for path in outside]


def _is_side_file(path: Path) -> bool:
    excluded = path.name == CONFIG_NAME or path.name.endswith(".index.json")
    return is_side_name(path.name) and not excluded and path.is_file()


def _check_case(files: Iterable[Path]) -> None:
    names: dict[str, str] = {}
    for path in files:
        other = names.setdefault(path.name.casefold(), path.name)
        if other != path.name:
            problem = f"its name differs from {other} in case only; expected distinct names"
            _fail(path, f"{problem}, also on macOS and Windows", "Rename one of the two")


def _check_inside(path: Path) -> None:
    if not is_inside(path):
        problem = f"links to {os.path.realpath(path)}; expected a file inside the directory"
        _fail(path, problem, "Replace the link by the file")


def _merge(headers: Iterable[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for header in headers:
        for name, tensor in header.items():
            first = tensors.setdefault(name, tensor)
            if first is not tensor:
                problem = f"tensor {name!r} is also in {first.file.name}; expected it in one shard"
                _fail(tensor.file, problem, "Download the checkpoint again")
    return tensors


def _compare(
    path: Path, index: Mapping[str, Any], tensors: Mapping[str, StoredTensor], strict: bool
) -> list[str]:
    """Compare the index with the shards' headers; return warnings."""
    weight_map = index["weight_map"]
    remedy = "Download the index and the shards again, of one revision"
    for name, shard in weight_map.items():
        if name not in tensors:
            _fail(path, f"tensor {shown(name)} should be in {shard}, but no shard has it", remedy)
        if tensors[name].file.name != shard:
            found = tensors[name].file.name
            _fail(path, f"tensor {name!r} should be in {shard}, but is in {found}", remedy)
    warnings = []
    unlisted = [name for name in tensors if name not in weight_map]
    if unlisted:
        first = tensors[unlisted[0]]
        problem = (
            f"{len(unlisted)} tensors are in shards but not in the index, the first is "
            f"{first.name!r} in {first.file.name}"
        )
        if strict:
            _fail(path, f"{problem}; expected all in the index", remedy)
        warnings.append(f"{path}: {problem}; they are used")
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    if total not in (None, nbytes):
        warnings.append(f"{path}: total_size is {shown(total)}, but the tensors have {nbytes} bytes")
    return warnings


def _read_into(data: torch.Tensor, path: Path, offset: int, stride: int, stamp: FileStamp) -> int:
    """Fill `data`, uint8 [R, B], from a file, rows `stride` bytes apart; return the number of bytes read.

    The number is smaller if the file ends early.
    """
    rows, width = data.shape
    if stride == width or rows == 1:
        rows, width = 1, data.numel()
    buffer = memoryview(data.flatten().numpy())  # type: ignore[arg-type]
    done = 0
    try:
        # A separate descriptor and pread, which has no position: thread-safe.
        with open_regular(path) as file:
            stamp.check(path, file.fileno())
            for row in range(rows):
                end = (row + 1) * width
                while done < end:
                    part = buffer[done : min(end, done + _READ_BYTES)]
                    count = os.preadv(file.fileno(), [part], offset + row * (stride - width) + done)
                    if count == 0:
                        return done
                    done += count
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error}); expected {len(buffer)} bytes"
        _fail(path, f"{problem} from byte {offset}", "Check the file and the disk")
    return done


def _fail(path: Path, problem: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"{path}: {problem}. {remedy}.") from None

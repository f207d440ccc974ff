"""Read, write and verify the manifest of a finished directory.

It contains its own hash: `manifest_sha256` hashes the text without this key. Equal content always gives equal
text, so any changed byte of the file is noticed.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantkit.checkpoint.output.atomic_write import (
    hash_file,
    is_inside,
    is_plain_name,
    read_inside,
    write_file,
)
from quantkit.checkpoint.output.lock import DirectoryLock, locked
from quantkit.errors import CheckpointError
from quantkit.files import os_error_text, parse_json, shown

MANIFEST_NAME = "quantkit_manifest.json"
#: Key of what `merge` merged.
MERGE = "merge"
OWN_HASH = "manifest_sha256"
_CONFIG = "config.json"
MAX_MANIFEST_BYTES = 64 << 20
#: Suffixes of files that loading takes as part of the model.
_OF_WEIGHTS = (".safetensors", ".safetensors.index.json")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REWRITE = "Write the checkpoint again or download it again."
_WITHOUT = f"Without {MANIFEST_NAME} the model loads, and nothing tells whether a byte has changed."


@dataclass(frozen=True)
class Problem:
    """Difference between a file of a directory and the manifest; `text` names it for the user.

    `kind` is "missing" also for what is no file, "link" for a link out of the directory. "size" and "sha256"
    are those of a changed file. "extra" is a file that the manifest does not list.
    """

    file: str
    kind: Literal["missing", "link", "size", "sha256", "extra"]
    text: str

    def __str__(self) -> str:
        return self.text


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read and validate the manifest of a finished directory.

    `files` maps file names to `{"sha256": hex, "size": bytes}`; all other keys are returned unchanged.
    Raises `CheckpointError` if the manifest is missing, too large, or lacks what every one has.
    """
    return _read(directory)[0]


def _read(directory: Path) -> tuple[dict[str, Any], bytes]:
    """Return the validated manifest, and its bytes."""
    path = directory / MANIFEST_NAME
    try:
        data = read_inside(path, MAX_MANIFEST_BYTES)
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{path} has more than the {MAX_MANIFEST_BYTES} bytes that a manifest may have. {_REWRITE}"
            )
    except FileNotFoundError:
        if (method := _other_method(directory)) is not None:
            raise CheckpointError(
                f"{directory} is of another tool: {_CONFIG} has quant_method {shown(method)} and no "
                "section 'quantkit'. Make it a quantkit checkpoint with `quantkit convert`; `eval` and "
                "`generate` take it as it is."
            ) from None
        raise CheckpointError(
            f"{path} is missing: {directory} is not a finished quantkit checkpoint. If a run was "
            "interrupted there, continue it with --resume."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {os_error_text(error)}. Make the file readable."
        ) from error
    try:
        manifest = parse_json(data, "it")
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}. {_REWRITE}") from None
    problem = _rule_broken(manifest)
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}. {_REWRITE}")
    return manifest, data


def _other_method(directory: Path) -> object:
    """Return the quant_method of a checkpoint quantized by another tool, else None."""
    try:
        config = parse_json(read_inside(directory / _CONFIG, MAX_MANIFEST_BYTES), "it")
        section = config.get("quantization_config")
    except (OSError, ValueError, AttributeError):
        return None
    return (
        section.get("quant_method", "") if isinstance(section, dict) and "quantkit" not in section else None
    )


def is_export(directory: Path) -> bool:
    """Return True if the manifest is that of `quantkit export`, whose files are another tool's checkpoint."""
    try:
        content = parse_json(read_inside(directory / MANIFEST_NAME, MAX_MANIFEST_BYTES), "it")
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "export" in content


def manifest_bytes(content: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest with this content and its own hash."""
    rest = {key: value for key, value in content.items() if key != OWN_HASH}
    return pretty_json({**rest, OWN_HASH: hashlib.sha256(pretty_json(rest)).hexdigest()})


def extend_manifest(directory: Path, values: Mapping[str, Any], lock: DirectoryLock | None = None) -> None:
    """Add keys to the manifest of a finished directory, in one step.

    `lock` is the lock of the directory if the caller holds it; None locks the directory during the call.
    Raises `CheckpointError` for a manifest that was modified, which would get a valid hash here. Raises
    `OutputError` if another process writes to the directory, or the disk fails.
    """
    if lock is None:
        with locked(directory) as own:
            return extend_manifest(directory, values, own)
    if problems := verify_manifest(directory):
        raise CheckpointError(f"{directory}: {problems[0]}. {_REWRITE}")
    content = read_manifest(directory)
    lock.check()
    write_file(directory, MANIFEST_NAME, [manifest_bytes({**content, **values})])


def pretty_json(value: Mapping[str, Any]) -> bytes:
    """Return JSON in the style of manifests, indexes and configs: equal content gives equal bytes."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def _rule_broken(manifest: Mapping[str, Any]) -> str | None:
    files = manifest.get("files")
    if not isinstance(files, dict):
        return f"'files' must be an object of file names, found {type(files).__name__}"
    broken = (_entry_rule_broken(name, entry) for name, entry in files.items())
    return next((text for text in broken if text is not None), None)


def _entry_rule_broken(name: str, entry: Any) -> str | None:
    if not is_plain_name(name):
        return f"file name {name!r} in 'files' must name a file in the directory itself"
    if not isinstance(entry, dict):
        return f"'files' entry of {name!r} must be an object with sha256 and size"
    digest, size = entry.get("sha256"), entry.get("size")
    if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
        return f"sha256 of {name!r} must be 64 lower-case hex digits, found {digest!r}"
    if type(size) is not int or size < 0:
        return f"size of {name!r} must be a number of bytes, found {size!r}"
    return None


def verify_manifest(directory: Path) -> list[Problem]:
    """Return the problem if the manifest in `directory` is not the one written, by its own hash; else [].
    Raises `CheckpointError` if the manifest is missing, too large, or lacks what every one has.
    """
    return _changes(*_read(directory))


def _changes(content: Mapping[str, Any], data: bytes) -> list[Problem]:
    if data == manifest_bytes(content):
        return []
    found = shown(content[OWN_HASH]) if OWN_HASH in content else "none"
    text = f"{MANIFEST_NAME} has changed since it was written: its own hash {OWN_HASH!r} is {found}"
    return [Problem(MANIFEST_NAME, "sha256", text)]


def check_beside(files: Sequence[Path]) -> None:
    """Check that files of weights of one directory have the names and sizes that its manifest lists.

    Does nothing without a manifest, and reads no weights. Raises `CheckpointError` for a damaged manifest and
    for another size. It is also raised for a file that only one of `files` and the manifest has.
    """
    directory = files[0].parent
    if not os.path.lexists(directory / MANIFEST_NAME):
        return
    try:
        content, data = _read(directory)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_WITHOUT}") from error
    listed, problems = content["files"], list(map(str, _changes(content, data)))
    weights = {name for name in listed if name.endswith(_OF_WEIGHTS)}
    # The loader reports missing indexes.
    here = [*files, *(directory / name for name in weights if name.endswith(".json"))]
    try:
        found = {path.name: path.stat().st_size for path in here if path.exists()}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory}: cannot be examined: {os_error_text(error)}. Check the disk and "
            "the permissions."
        ) from error
    for name in sorted(weights | found.keys()):
        size = listed.get(name, {}).get("size")
        if found.get(name) != size:
            is_here = f"has {found[name]} bytes" if name in found else "is not among the weights"
            says = "does not list it" if size is None else f"says {size}"
            problems.append(f"{name} {is_here}, and {MANIFEST_NAME} {says}")
    if problems:
        raise CheckpointError(f"{directory}: {problems[0]}. {_REWRITE} {_WITHOUT}")


def unlisted_files(directory: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Return the names in `directory` that the manifest does not list, sorted; a folder's ends in `/`."""
    known = {*manifest["files"], MANIFEST_NAME}
    try:
        return sorted(
            f"{path.name}/" if path.is_dir() else path.name
            for path in directory.iterdir()
            if path.name not in known
        )
    except OSError as error:
        raise CheckpointError(f"cannot list {directory}: {os_error_text(error)}. Check the disk.") from error


def verify_files(
    directory: Path,
    manifest: Mapping[str, Any],
    progress: Callable[[int], None] | None = None,
) -> list[Problem]:
    """Return the differences between `directory` and a manifest from `read_manifest`, sorted by name.

    `progress` is called with the bytes hashed since its last call. Raises `CheckpointError` for a file that
    cannot be read.
    """
    files: dict[str, dict[str, Any]] = manifest["files"]
    problems = [
        Problem(name, "extra", f"{name} is not in the manifest")
        for name in unlisted_files(directory, manifest)
        if name.rstrip("/").endswith(_OF_WEIGHTS)
    ]
    for name, entry in files.items():
        problem = _file_problem(directory / name, entry, progress)
        if problem is not None:
            problems.append(problem)
    return sorted(problems, key=lambda problem: problem.file)


def _file_problem(
    path: Path, entry: Mapping[str, Any], progress: Callable[[int], None] | None
) -> Problem | None:
    try:
        size = path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise CheckpointError(f"cannot examine {path}: {os_error_text(error)}. Check the disk.") from error
    if size is None:
        there = "is no file" if path.is_symlink() or path.exists() else "is missing"
        return Problem(path.name, "missing", f"{path.name} {there}")
    if not is_inside(path):
        return Problem(path.name, "link", f"{path.name} links out of the directory")
    if size != entry["size"]:
        text = f"{path.name} has {size} bytes, the manifest says {entry['size']}"
        return Problem(path.name, "size", text)
    digest = hash_file(path, progress)
    if digest != entry["sha256"]:
        text = f"{path.name} has sha256 {digest}, the manifest says {entry['sha256']}"
        return Problem(path.name, "sha256", text)
    return None

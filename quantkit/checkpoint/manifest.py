"""The manifest of a finished directory, and whether its files are still what the manifest says."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quantkit.checkpoint.durable import hash_file, is_inside, is_plain_name, read_inside, write_file
from quantkit.errors import CheckpointError
from quantkit.files import os_error_text, parse_json

MANIFEST_NAME = "quantkit_manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_REWRITE = "Write the checkpoint again or download it again."


@dataclass(frozen=True)
class Problem:
    """A file of a directory that is not what the manifest says."""

    file: str
    kind: Literal["missing", "link", "size", "sha256", "extra"]
    text: str

    def __str__(self) -> str:
        return self.text


def read_manifest(directory: Path) -> dict[str, Any]:
    """The validated manifest of a finished directory.

    `files` maps plain file names to `{"sha256": hex, "size": bytes}`; every other key is what the
    writer put there. `CheckpointError` if it is missing, too large or breaks these rules.
    """
    path = directory / MANIFEST_NAME
    try:
        data = read_inside(path, MAX_MANIFEST_BYTES)
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(
                f"{path} has more than the {MAX_MANIFEST_BYTES} bytes that a manifest may have. {_REWRITE}"
            )
    except FileNotFoundError:
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
    return manifest


def extend_manifest(directory: Path, values: Mapping[str, Any]) -> None:
    """Add keys to the manifest of a finished directory, in one step; `OutputError` on failure."""
    manifest = {**read_manifest(directory), **values}
    write_file(directory, MANIFEST_NAME, [pretty_json(manifest)])


def pretty_json(value: Mapping[str, Any]) -> bytes:
    """JSON as manifests, indexes and configs are written: the same bytes for the same content."""
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


def verify_files(
    directory: Path,
    manifest: Mapping[str, Any],
    progress: Callable[[int], None] | None = None,
    *,
    contents: bool = True,
) -> list[Problem]:
    """What in `directory` differs from a manifest that `read_manifest` returned, sorted by name.

    `progress` is called with the number of bytes hashed since its last call. Without `contents`
    only presence and sizes are compared. A file that cannot be read is a `CheckpointError`.
    """
    files: dict[str, dict[str, Any]] = manifest["files"]
    problems = [
        Problem(path.name, "extra", f"{path.name} is not in the manifest")
        for path in directory.glob("*.safetensors")
        if path.name not in files
    ]
    for name, entry in files.items():
        problem = _file_problem(directory / name, entry, progress if contents else None, contents)
        if problem is not None:
            problems.append(problem)
    return sorted(problems, key=lambda problem: problem.file)


def _file_problem(
    path: Path, entry: Mapping[str, Any], progress: Callable[[int], None] | None, contents: bool
) -> Problem | None:
    if not path.is_file():
        return Problem(path.name, "missing", f"{path.name} is missing")
    if not is_inside(path):
        return Problem(path.name, "link", f"{path.name} links out of the directory")
    size = path.stat().st_size
    if size != entry["size"]:
        text = f"{path.name} has {size} bytes, the manifest says {entry['size']}"
        return Problem(path.name, "size", text)
    if not contents:
        return None
    digest = hash_file(path, progress)
    if digest != entry["sha256"]:
        text = f"{path.name} has sha256 {digest}, the manifest says {entry['sha256']}"
        return Problem(path.name, "sha256", text)
    return None

"""Cache of measured sensitivities: one JSON file per model, samples, method and schemes.

One file serves any budget. Files are safe to delete; a damaged file is replaced by a new measurement.
"""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.checkpoint.output.journal import json_hash
from quantkit.checkpoint.source import Checkpoint
from quantkit.files import open_regular, os_error_text, parse_json, replace_file, user_cache
from quantkit.packing.schemes import Scheme
from quantkit.quantization.allocate.sensitivity import Sensitivities

#: Version of the cache. Raise it when the measurement or the file changes: old files are then ignored.
_REVISION = 4
_HASH = "sha256"
#: Largest file, in bytes: a thousand linears in thirty schemes take about 1 MB.
MAX_BYTES = 64 << 20
_LARGEST = sys.float_info.max  # JSON may have larger integers.


def cache_key(
    checkpoint: Checkpoint,
    tokens_sha256: str,
    method: str,
    device: str,
    schemes: Mapping[str, Sequence[Scheme]],
) -> str:
    """Return the hex SHA-256 of everything on which a measurement depends.

    The hash covers files, tensors and config of the source, the tokens, the method and the schemes of
    linears. It also covers the kind of device and the versions of libraries.
    """
    tensors = [[t.name, t.dtype, list(t.shape), t.file.name, t.offset] for t in checkpoint.tensors.values()]
    facts = {
        "revision": _REVISION,
        "source": checkpoint.fingerprint(),
        "tensors": tensors,
        "config": checkpoint.config,
        "tokens_sha256": tokens_sha256,
        "method": method,
        "device": device,
        "schemes": {name: [scheme.to_dict() for scheme in row] for name, row in schemes.items()},
        "versions": [__version__, torch.__version__],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class SensitivityCache:
    """Cache file of one key; `path` is None without a cache directory."""

    key: str
    path: Path | None

    @classmethod
    def of(cls, key: str) -> "SensitivityCache":
        """Return the cache file of a key."""
        directory = user_cache()
        return cls(key, None if directory is None else directory / "sensitivity" / f"{key}.json")

    def read(self, schemes: Mapping[str, Sequence[Scheme]]) -> tuple[Sensitivities | None, tuple[str, ...]]:
        """Return the cached sensitivities, and messages for the user; `schemes` are those of each linear.

        None without a cached file, and None with a message if it cannot be read, is damaged or of others.
        """
        if self.path is None:
            return None, ()
        try:
            with open_regular(self.path) as file:
                data = file.read(MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None, ()
        except OSError as error:
            return None, (f"the sensitivities {self.path} cannot be read: {os_error_text(error)}.",)
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"it has more than the {MAX_BYTES} bytes it may have")
            return _parsed(parse_json(data, "it"), self.key, schemes), ()
        except ValueError as error:
            return None, (f"the sensitivities {self.path} are damaged and measured anew: {error}.",)

    def write(self, found: Sensitivities) -> tuple[str, ...]:
        """Write the file in one step; return notes if that fails."""
        remedy = "Another run will measure again; set XDG_CACHE_HOME to a directory that can be written."
        if self.path is None:
            return (f"the measured sensitivities are not kept, as there is no home directory. {remedy}",)
        facts = {"key": self.key, "losses": found.losses, "expert_tokens": found.expert_tokens}
        data = json.dumps({**facts, _HASH: json_hash(facts)}, indent=1, allow_nan=False).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, data + b"\n")
        except OSError as error:
            return (
                f"the measured sensitivities are not kept in {self.path}: {os_error_text(error)}. {remedy}",
            )
        return ()


def _parsed(data: Mapping[str, Any], key: str, schemes: Mapping[str, Sequence[Scheme]]) -> Sensitivities:
    """Parse the JSON object of a file; raise `ValueError` if it is damaged or of other schemes.

    `key` is the one that it should be stored by, `schemes` are those that each linear should have losses of.
    """
    if data.keys() != {"key", "losses", "expert_tokens", _HASH} or data["key"] != key:
        raise ValueError("it does not hold the key that it is called by")
    losses, tokens = data["losses"], data["expert_tokens"]
    if not isinstance(losses, dict) or losses.keys() != schemes.keys():
        raise ValueError("its linears are not those of the model")
    for name, row in losses.items():
        if not isinstance(row, list) or len(row) != len(schemes[name]):
            raise ValueError(f"{name!r} has not one loss for each scheme")
        if not all(
            isinstance(x, float | int) and not isinstance(x, bool) and 0 <= x <= _LARGEST for x in row
        ):
            raise ValueError(f"a loss of {name!r} is not a finite number of at least 0")
    if not isinstance(tokens, dict) or not all(
        isinstance(row, list) and all(type(count) is int and count >= 0 for count in row)
        for row in tokens.values()
    ):
        raise ValueError("the tokens of its experts are not numbers of at least 0")
    if data[_HASH] != json_hash({name: value for name, value in data.items() if name != _HASH}):
        raise ValueError("its hash is not that of its content")
    return Sensitivities(
        {name: tuple(map(float, losses[name])) for name in schemes},
        {module: tuple(row) for module, row in tokens.items()},
    )

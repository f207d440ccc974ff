"""Files that quantkit writes and reads back: journals, partial results, measured sensitivities.

Each has its hash, so whatever is read is what was written; the seeds are made by the code that writes them.
"""

import json
import re
import tempfile
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.checkpoint.output.existing import start_again, start_over
from quantkit.checkpoint.output.journal import JOURNAL_NAME, Entry, read_journal
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import OutputError, QuantkitError
from quantkit.eval.metrics import TokenScores
from quantkit.eval.result_cache import Partial
from quantkit.files import NoFileError
from quantkit.packing.schemes import scheme
from quantkit.quantization.allocate.sensitivity import Sensitivities
from quantkit.quantization.allocate.sensitivity_cache import SensitivityCache

from .files import write_items
from .mutate import pack_directory, unpack_directory


class Ignored(QuantkitError):
    """What a reader leaves out without an error."""


# Journals, with the shards and work files that they list

_RUN = {"options": {"format": "int4", "group_size": 32}, "source": "0" * 64, "version": "0.1.0"}
_DETAIL = {"layers": {"a": {"squared": [1.0, 2.0], "output": [0.5, 1.0], "note": None}}}


@cache
def _interrupted() -> tuple[dict[str, bytes], dict[str, Entry]]:
    """The files of a run that was interrupted after a shard and a work file, and what its journal says."""
    with tempfile.TemporaryDirectory() as place:
        out, source = Path(place, "out"), Path(place, "source")
        source.mkdir()
        with OutputDirectory.open(out, source, Mode.NEW, _RUN, 0) as output:
            for name in ("model-00001.safetensors", "block-00000.safetensors"):
                with output.shard(name, [TensorSpec.of("w", torch.ones(3))], {}) as file:
                    file.write("w", torch.ones(3))
                    file.detail.update(_DETAIL)
        state = read_journal(out)
        assert state is not None
        return {path.name: path.read_bytes() for path in out.iterdir()}, state.entries


@cache
def journals() -> tuple[bytes, ...]:
    files, _ = _interrupted()
    return pack_directory(dict(files)), pack_directory({JOURNAL_NAME: files[JOURNAL_NAME]})


def check_journal(case: bytes, directory: Path) -> None:
    write_items(directory, unpack_directory(case))
    try:
        state = read_journal(directory)
    except OutputError as error:
        _follow(directory, str(error))
        raise
    _, entries = _interrupted()
    if state is not None:
        assert state.run == _RUN
        assert state.entries.items() <= entries.items() and state.claimed <= entries.keys()
    for start in (start_again, start_over):
        try:
            begun = start(directory, _RUN, 0)
        except NoFileError as error:
            # `OutputDirectory.open` says it in these words.
            raise OutputError(str(error)) from error
        except QuantkitError:
            if start is start_over:
                raise
            continue
        for name, entry in begun.entries.items():
            assert entry == entries[name]
            assert (directory / name).read_bytes() == _interrupted()[0][name]
        if begun.journal is not None:
            begun.journal.close()


def _follow(directory: Path, text: str) -> None:
    """Do as an error says: without the line that it names, the journal is sound up to there."""
    found = re.search(r"is damaged in line (\d+):", text)
    if found is None or found[1] == "1":
        return
    path, number = directory / JOURNAL_NAME, int(found[1])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[: number - 1], *lines[number:]]))
    try:
        read_journal(directory)
    except OutputError as error:
        again = re.search(r"is damaged in line (\d+):", str(error))
        assert again is not None and int(again[1]) >= number, error


# Partial results of evaluations

_SCORES_SHAPE = (2, 3)
_TASK = {"accuracy": 0.5, "items": [1, 2]}


@cache
def _scores() -> dict[str, TokenScores]:
    nll = torch.rand(_SCORES_SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return {"full": TokenScores(nll, nll + 1, nll / 2, nll > 0.5), "bare": TokenScores(nll)}


@cache
def partials() -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder:
        partial = Partial(Path(folder))
        for name, scores in _scores().items():
            partial.store_scores("key", name, scores)
        partial.store_json("key", "task", _TASK)
        files = {path.name: path.read_bytes() for path in sorted((partial.directory / "key").iterdir())}
        return (pack_directory(dict(files)),)


def check_partial(case: bytes, directory: Path) -> None:
    items = unpack_directory(case)
    partial = Partial(directory)
    folder = partial.directory / "key"
    folder.mkdir(parents=True)
    write_items(folder, items)
    task = partial.json("key", "task")
    assert task in (None, _TASK)
    read = {name: partial.scores("key", name, _SCORES_SHAPE) for name in _scores()}
    for name, found in read.items():
        for field in fields(TokenScores) if found is not None else ():
            one, other = getattr(found, field.name), getattr(_scores()[name], field.name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other), field.name
    if task is None or None in read.values():
        raise Ignored("damaged, and measured again")


# Measured sensitivities

_SCHEMES = {name: (scheme("int4"), scheme("int8")) for name in ("a", "model.layers.0.mlp.down_proj")}
_MEASURED = Sensitivities(dict.fromkeys(_SCHEMES, (0.5, 1e-09)), {"experts": (3, 0)})


def _cache_in(directory: Path) -> SensitivityCache:
    return SensitivityCache("0" * 64, directory / "measured.json")


@cache
def sensitivities() -> tuple[bytes, ...]:
    with tempfile.TemporaryDirectory() as folder:
        kept = _cache_in(Path(folder))
        assert kept.write(_MEASURED) == () and kept.path is not None
        return (kept.path.read_bytes(),)


def check_sensitivities(case: bytes, directory: Path) -> None:
    kept = _cache_in(directory)
    assert kept.path is not None
    kept.path.write_bytes(case)
    found, notes = kept.read(_SCHEMES)
    if found is None:
        raise Ignored(notes[0])
    assert found == _MEASURED and not notes
    written: Any = json.loads(case)
    assert written["losses"] == {name: list(row) for name, row in _MEASURED.losses.items()}

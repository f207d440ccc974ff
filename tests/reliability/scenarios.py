"""What runs while calls fail or the process is killed, and what must hold afterwards."""

import contextlib
import functools
import io
import json
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from quantkit.checkpoint.output.lock import LOCK_NAME
from quantkit.cli.main import main
from quantkit.errors import QuantkitError
from quantkit.model.tokenizer import tokenizer
from quantkit.quantization.blockwise import pipeline
from quantkit.runtime.load import load
from quantkit.signals import NUMBERS
from quantkit.verification.verify import verify

from ..checkpoint.gguf_files import tiny_model, tokenizer_metadata, write_gguf
from ..publish.conftest import standing_in

STORIES = Path(__file__).parents[2] / "examples" / "stories.txt"
#: Options of a run with calibration data, in several shards.
GPTQ = (
    *("--method", "gptq", "--no-check", "--max-shard-size", "150KB"),
    *("--calibration", f"{STORIES}:4", "--calibration-length", "16"),
)


def gguf_source(place: Path) -> Path:
    """A GGUF file of a tiny llama in Q4_1, as `convert` takes it, with a tokenizer."""
    model = tiny_model("llama", vocab_size=264, tie_word_embeddings=True)

    def kind(name: str, shape: tuple[int, ...]) -> str:
        return "Q8_0" if name == "token_embd.weight" else "Q4_1" if len(shape) == 2 else "F32"

    return write_gguf(place / "tiny.gguf", "llama", model, kind, **tokenizer_metadata())


class Failed(Exception):
    """A command that ended with an error and an exit code, and what it said."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def command(*arguments: object) -> str:
    """Run `quantkit` in this process; what it said on stdout and stderr. `Failed` unless it exits with 0."""
    said = io.StringIO()
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        with (
            patch.object(sys, "argv", ["quantkit", *map(str, arguments)]),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            main()
    except SystemExit as ended:
        if ended.code:
            raise Failed(int(ended.code), said.getvalue()) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return said.getvalue()


def contents(directory: Path) -> dict[str, bytes]:
    """Every file below a directory by its relative path."""
    found = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in found}


def passes(directory: Path) -> bool:
    """Whether `quantkit verify` takes a directory for a finished checkpoint."""
    try:
        return not any(check.problems for check in verify(directory, reload=False))
    except QuantkitError:
        return False


def loads(directory: Path) -> bool:
    """Whether `quantkit.load` takes a directory for a checkpoint."""
    try:
        load(directory)
    except QuantkitError:
        return False
    return True


@dataclass(frozen=True)
class Scenario:
    """Something to interrupt in a `place`, a directory of its own."""

    name: str
    #: What it may raise beside errors of quantkit.
    raises: ClassVar[tuple[type[Exception], ...]] = ()

    def roots(self, place: Path) -> Sequence[Path]:
        """Where calls count."""
        return [place]

    def prepare(self, place: Path) -> None:
        """Put there what is there before."""

    def run(self, place: Path) -> Any:
        """What is interrupted."""
        raise NotImplementedError

    def rerun(self, place: Path) -> Any:
        """What a user does then."""
        return self.run(place)

    def result(self, place: Path, made: Any) -> Any:
        """What must be the same, however often it was interrupted; `made` is what the run returned."""
        raise NotImplementedError

    def unsound(self, place: Path, expected: Any) -> str | None:
        """What is wrong with what is there after an interruption."""
        return None


@dataclass(frozen=True)
class Quantize(Scenario):
    """`quantkit quantize` or `convert`, where `before`, if anything, is in the output already."""

    source: Path
    options: tuple[object, ...]
    before: Path | None = None
    mode: tuple[str, ...] = ()
    again: str = "--resume"
    verb: str = "quantize"

    def roots(self, place: Path) -> Sequence[Path]:
        return [self.source, place]

    def prepare(self, place: Path) -> None:
        if self.before is not None:
            shutil.copytree(self.before, place / "out")

    def run(self, place: Path) -> Any:
        return self._quantize(place, *self.mode)

    def rerun(self, place: Path) -> Any:
        return self._quantize(place, self.again)

    def result(self, place: Path, made: Any) -> Any:
        # A lock file that could not be removed blocks nobody.
        return {name: data for name, data in contents(place / "out").items() if name != LOCK_NAME}

    def unsound(self, place: Path, expected: Any) -> str | None:
        out = place / "out"
        if not passes(out):
            return "load accepts what verify refuses" if loads(out) else None
        left = {k: v for k, v in contents(out).items() if k != LOCK_NAME}
        before = None if self.before is None else contents(self.before)
        return None if left in (expected, before) else "verify accepts another directory"

    def _quantize(self, place: Path, *mode: str) -> str:
        # Hidden states are stored after every block.
        with patch.object(pipeline, "HIDDEN_SECONDS", 0.0):
            return command(self.verb, self.source, place / "out", *self.options, *mode)


@dataclass(frozen=True)
class Export(Quantize):
    """`quantkit export`, whose result no model is loaded of; it is finished once it has config.json."""

    def unsound(self, place: Path, expected: Any) -> str | None:
        out = place / "out"
        if not (out / "config.json").exists():
            return None
        left = {k: v for k, v in contents(out).items() if k != LOCK_NAME}
        return None if left == expected else "config.json is there, and other files than of a finished export"


@dataclass(frozen=True)
class Evaluate(Scenario):
    """`quantkit eval` of a packed model against its original."""

    source: Path
    packed: Path
    report: bool = False

    def roots(self, place: Path) -> Sequence[Path]:
        return [self.source, self.packed, place]

    def prepare(self, place: Path) -> None:
        (place / "text.txt").write_bytes(STORIES.read_bytes()[:3000])

    def run(self, place: Path) -> Any:
        keep = ("--report", place / "report") if self.report else ("--work", place / "work")
        return command(
            *("eval", self.packed, "--against", self.source, "--text", place / "text.txt", "--window", 64),
            *("--max-windows", 3, "--json", place / "eval.json", *keep),
        )

    def result(self, place: Path, made: Any) -> Any:
        figures = json.loads((place / "eval.json").read_text())
        left = sorted(str(path.relative_to(place)) for path in place.rglob("*"))
        if ".quantkit-eval is not deleted" in (made or ""):
            left = [name for name in left if ".quantkit-eval" not in name]
        return {k: v for k, v in figures.items() if "seconds" not in k and k != "notes"}, left

    def unsound(self, place: Path, expected: Any) -> str | None:
        path = place / "eval.json"
        # Made before the work, to know that it can be.
        if not path.exists() or not path.read_bytes():
            return None
        try:
            done = self.result(place, None)[0] == expected[0]
        except ValueError:
            return "eval.json is cut short"
        return None if done else "eval.json has other figures"


@dataclass(frozen=True)
class Load(Scenario):
    """`quantkit.load` and `tokenizer`."""

    packed: Path

    def roots(self, place: Path) -> Sequence[Path]:
        return [self.packed]

    def run(self, place: Path) -> Any:
        return load(self.packed), tokenizer(self.packed)

    def result(self, place: Path, made: Any) -> Any:
        model, words = made
        state = {
            name: (tensor.dtype, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, tensor in model.state_dict().items()
        }
        configs = model.config.to_dict(), model.generation_config.to_dict()
        return state, configs, words("Once upon a time")["input_ids"]


@dataclass(frozen=True)
class Save(Scenario):
    """`save_pretrained` of a packed model: transformers writes, with errors of its own."""

    packed: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    raises = (OSError,)

    def run(self, place: Path) -> Any:
        loaded(self.packed).save_pretrained(place / "saved", **self.options)

    def result(self, place: Path, made: Any) -> Any:
        return contents(place / "saved")

    def unsound(self, place: Path, expected: Any) -> str | None:
        saved = place / "saved"
        if not saved.is_dir() or not loads(saved) or contents(saved) == expected:
            return None
        return "load accepts another directory"


@dataclass(frozen=True)
class Verify(Scenario):
    """`quantkit verify` without running the model, also against the `source` that was converted."""

    packed: Path
    source: Path | None = None

    def roots(self, place: Path) -> Sequence[Path]:
        return [self.packed] if self.source is None else [self.packed, self.source]

    def run(self, place: Path) -> Any:
        against = () if self.source is None else ("--against", self.source)
        return command("verify", self.packed, "--no-reload", *against)

    def result(self, place: Path, made: Any) -> Any:
        return made.splitlines()[-3:]


@dataclass(frozen=True)
class Report(Scenario):
    """`quantkit report` of a packed model, over an earlier card."""

    packed: Path

    def roots(self, place: Path) -> Sequence[Path]:
        return [self.packed, place]

    def prepare(self, place: Path) -> None:
        (place / "card").mkdir()
        (place / "card/README.md").write_text("an earlier one")

    def run(self, place: Path) -> Any:
        options = ("--license", "mit", "--repo", "me/tiny", "--overwrite")
        return command("report", self.packed, "--out", place / "card", *options)

    def result(self, place: Path, made: Any) -> Any:
        return contents(place / "card")

    def unsound(self, place: Path, expected: Any) -> str | None:
        left = (place / "card/README.md").read_bytes()
        return None if left in (b"an earlier one", expected["README.md"]) else "the card is cut short"


@dataclass(frozen=True)
class Push(Scenario):
    """`quantkit push` of a packed model to a hub that is stood in for."""

    packed: Path
    #: What the hub has of the last run.
    hub: dict[str, bytes] = field(default_factory=dict)

    def roots(self, place: Path) -> Sequence[Path]:
        return [self.packed]

    def run(self, place: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch, standing_in(patch) as state:
            try:
                command("push", self.packed, "me/tiny", "--license", "mit")
            finally:
                self.hub.clear()
                self.hub.update(state.branches.get("main", {}))

    def result(self, place: Path, made: Any) -> Any:
        return dict(self.hub)

    def unsound(self, place: Path, expected: Any) -> str | None:
        return None if self.hub in ({}, expected) else "the hub has a part of it"


@functools.cache
def loaded(packed: Path) -> Any:
    """The model of a directory, loaded once."""
    return load(packed)

"""One case after another: made from its number, run within its bounds, and told apart."""

import shutil
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from quantkit.errors import QuantkitError

from .guard import Hang, bounded, check_message
from .targets import Target

CORPUS = Path(__file__).parent / "corpus"


@dataclass
class Tally:
    """How cases ended: `valid`, the class of a refusal, or a finding."""

    outcomes: Counter[str] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        return sum(self.outcomes.values())


def case_of(target: Target, seed: int, number: int) -> bytes:
    """The case number `number` of a run; the first of each target are its seeds as they are."""
    seeds = target.seeds()
    if number < len(seeds):
        return seeds[number]
    random = Random(f"{target.name} {seed} {number}")
    return target.mutate(random.choice(seeds), random)


class Place:
    """The directory that a case gets, empty, in `parent`; beside it is a file that none may touch."""

    def __init__(self, parent: Path) -> None:
        self.directory = parent / "case"
        (parent / "outside").write_text("nobody may read this")
        self.directory.mkdir()

    def clear(self) -> None:
        for path in self.directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def run_case(target: Target, case: bytes, place: Place) -> str:
    """`valid` or the class of the `QuantkitError`; anything else is raised."""
    try:
        with bounded(place.directory, target.seconds):
            target.check(case, place.directory)
    except QuantkitError as error:
        check_message(error)
        return type(error).__name__
    finally:
        place.clear()
    return "valid"


def corpus(name: str) -> list[Path]:
    """The kept findings of a target."""
    directory = CORPUS / name
    return sorted(directory.iterdir()) if directory.is_dir() else []


def finding(error: BaseException) -> str:
    """What kind of finding it is, and where: the same for the same bug."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/quantkit/" in frame.filename]
    frames = frames or traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    if isinstance(error, Hang):
        return f"Hang at {where}"
    return f"{type(error).__name__} at {where}: {str(error)[:200]}"


def in_scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory in memory where there is one: a long run writes millions of files."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="quantkit-fuzz-", dir=memory if memory.is_dir() else None)

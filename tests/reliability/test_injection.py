"""Whatever call fails, nothing passes for finished that is not, and going on ends in the same bytes."""

import ast
import itertools
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import quantkit
from quantkit.files import TempFile

from ..checkpoint.low_bit.makers import awq
from ..quantization.test_convert_low_bit import source_of
from .injection import Fault, Injection
from .scenarios import (
    GPTQ,
    Evaluate,
    Export,
    Failed,
    Load,
    Push,
    Quantize,
    Report,
    Save,
    Scenario,
    Verify,
    command,
    contents,
    gguf_source,
)
from .sweep import sweep

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"
#: As a compressed-tensors checkpoint in one file, and as quantkit's own in two.
ONE = ("--method", "rtn", "--no-check", "--format", "int4", "--group-size", "channel")
MLX = ("--to", "mlx", "--max-shard-size", "60KB")
TWO = ("--method", "rtn", "--no-check", "--format", "int3", "--max-shard-size", "150KB")


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, what was made of it in `one` file and in `two`, and a run that was interrupted there."""
    place = tmp_path_factory.mktemp("injection")
    source = place / "source"
    shutil.copytree(SOURCE, source)
    # Not what transformers takes where there is none.
    (source / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "top_k": 7}')
    command("quantize", source, place / "one", *ONE)
    command("quantize", source, place / "two", *TWO)
    gguf_source(place)
    command("convert", place / "tiny.gguf", place / "converted", "--no-check")
    source_of(place, lambda rows, columns: awq(rows, columns, 16)).rename(place / "awq")
    for name, options, renames in (("unfinished", TWO, 2), ("unfinished-gptq", GPTQ, 4)):
        (place / name).mkdir()
        _stop_at_rename(renames, Quantize(name, source, options), place / name)
    return place


def _stop_at_rename(number: int, scenario: Scenario, place: Path) -> None:
    """Interrupt a run as a file of `place` gets its name: first the journal, then shards or blocks."""
    left, replace = itertools.count(1), os.replace

    def stop(temporary: Path, path: Path) -> None:
        # The tokenizer is tried out in a temporary directory.
        if Path(path).is_relative_to(place) and next(left) > number:
            raise KeyboardInterrupt
        replace(temporary, path)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Failed):
        patch.setattr(os, "replace", stop)
        scenario.run(place)
    assert [*place.glob("out/*.safetensors")]


def quantize(name: str, options: tuple[object, ...], **more: object) -> Callable[[Path], Scenario]:
    def made(places: Path) -> Scenario:
        given = {key: places / value if key == "before" else value for key, value in more.items()}
        return Quantize(name, places / "source", options, **given)

    return made


def convert(name: str, source: str, *options: object) -> Callable[[Path], Scenario]:
    return lambda places: Quantize(name, places / source, options, verb="convert")


OVERWRITE = {"mode": ("--overwrite",), "again": "--overwrite"}
SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "one file": quantize("one file", ONE),
    "shards": quantize("shards", TWO),
    "check": quantize("check", tuple(option for option in ONE if option != "--no-check")),
    "gptq": quantize("gptq", GPTQ),
    "resume": quantize("resume", TWO, before="unfinished/out", mode=("--resume",)),
    "resume gptq": quantize("resume gptq", GPTQ, before="unfinished-gptq/out", mode=("--resume",)),
    "overwrite": quantize("overwrite", ONE, before="two", **OVERWRITE),
    "convert": convert("convert", "tiny.gguf", "--no-check", "--max-shard-size", "60KB"),
    "convert awq": convert("convert awq", "awq"),
    "export": lambda places: Export("export", places / "converted", ("--to", "gguf"), verb="export"),
    "export mlx": lambda places: Export("export mlx", places / "converted", MLX, verb="export"),
    "eval": lambda places: Evaluate("eval", places / "source", places / "one"),
    "report": lambda places: Evaluate("report", places / "source", places / "one", report=True),
    "load": lambda places: Load("load", places / "two"),
    "save": lambda places: Save("save", places / "one"),
    "save shards": lambda places: Save("save shards", places / "one", {"max_shard_size": "150KB"}),
    "verify": lambda places: Verify("verify", places / "two"),
    "against": lambda places: Verify("against", places / "converted", places / "tiny.gguf"),
    "card": lambda places: Report("card", places / "two"),
    "push": lambda places: Push("push", places / "two"),
}

#: Every how many of the calls fail in the long sweep: by scenario times by fault. A disk that is gone or
#: full, and a lack of memory, are much the same wherever they begin.
OF_SCENARIO = {
    **{"shards": 1, "load": 1, "save": 1, "save shards": 1, "verify": 1, "card": 1, "push": 1},
    **{"against": 2, "resume": 3, "one file": 4, "overwrite": 4, "convert": 4, "check": 8},
    **{"export": 4, "export mlx": 2},
    **{"gptq": 8, "eval": 8, "convert awq": 8, "resume gptq": 12, "report": 48},
}
OF_FAULT = {Fault.EIO: 1, Fault.DEAD: 5, Fault.FULL: 2, Fault.SHORT: 2, Fault.MEMORY: 7}
READERS, SAVERS = ("load", "verify", "against", "push"), ("save", "save shards")
#: The long sweep of a scenario is cut into so many, for as many processes.
PARTS = {"shards": 12, "report": 8, **dict.fromkeys(("save", "save shards", "card", "verify"), 1)}
LONG = [
    (name, fault, every * of_fault, part)
    for name, every in OF_SCENARIO.items()
    for fault, of_fault in OF_FAULT.items()
    for part in range(-(-PARTS.get(name, 6) // {Fault.EIO: 1, Fault.DEAD: 3}.get(fault, 12)))
    if not (name in READERS and fault in (Fault.FULL, Fault.SHORT))
    and not (name in (*READERS, *SAVERS, "card") and fault is Fault.MEMORY)
    # Its writes are in Rust, which a test with a real limit is for.
    and not (name in SAVERS and fault is Fault.SHORT)
]


def strided(stride: int, start: int = 1) -> Callable[[int], range]:
    return lambda calls: range(start, calls + 1, stride)


@pytest.mark.parametrize(
    ("name", "fault", "stride"),
    [
        ("one file", Fault.EIO, 91),
        ("shards", Fault.DEAD, 131),
        ("shards", Fault.FULL, 37),
        ("overwrite", Fault.SHORT, 43),
        ("convert", Fault.EIO, 211),
        ("export", Fault.EIO, 301),
        ("gptq", Fault.EIO, 401),
        ("resume", Fault.EIO, 131),
        ("eval", Fault.EIO, 301),
        ("load", Fault.EIO, 31),
        ("save", Fault.FULL, 2),
        ("card", Fault.EIO, 11),
        ("push", Fault.EIO, 23),
        ("gptq", Fault.MEMORY, 401),
    ],
)
@pytest.mark.sampled(3, "fault")
def test_some_calls_fail(places: Path, tmp_path: Path, name: str, fault: Fault, stride: int) -> None:
    done = sweep(SCENARIOS[name](places), fault, tmp_path, strided(stride, stride // 2))
    assert not done.violations, "\n".join(done.violations)
    assert done.errors


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault", "stride", "part"), LONG)
def test_many_calls_fail(
    places: Path, tmp_path: Path, name: str, fault: Fault, stride: int, part: int
) -> None:
    parts = max(of for *same, of in LONG if same == [name, fault, stride]) + 1
    done = sweep(SCENARIOS[name](places), fault, tmp_path, strided(stride * parts, 1 + stride * part))
    done.tell()
    assert not done.violations, "\n".join(done.violations)
    assert done.errors


def test_a_planted_swallowed_error_is_a_violation(places: Path, tmp_path: Path) -> None:
    publish = TempFile.publish

    def careless(file: TempFile, *, durable: bool = True) -> None:
        with suppress(OSError):
            publish(file, durable=durable)

    scenario = SCENARIOS["shards"](places)
    counted = Injection(scenario.roots(tmp_path), 0, Fault.FULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TempFile, "publish", careless)
        with counted.active():
            scenario.run(tmp_path)
        last = [n for n, call in enumerate(counted.calls, 1) if call.point.kind == "rename"][-1:]
        done = sweep(scenario, Fault.FULL, tmp_path, lambda calls: last)
    assert done.runs == 1 and any("rename at files.py" in problem for problem in done.violations)


def test_short_reads_are_continued(places: Path, tmp_path: Path) -> None:
    preadv, pread = os.preadv, os.pread
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1000]], at))
        patch.setattr(os, "pread", lambda fd, count, at: pread(fd, min(count, 1000), at))
        command("quantize", places / "source", tmp_path / "out", *TWO)
    assert contents(tmp_path / "out") == contents(places / "two")


#: Who may open files by other means than quantkit/files.py, and why.
OPENERS = {
    "about.py": "how pip says that quantkit was installed",
    "calibrate/data/documents.py": "texts, read line by line",
    "checkpoint/gguf/open_gguf.py": "the configs that stand for its header, in a temporary directory",
    "checkpoint/hub/cache.py": "downloaded files, to hash them",
    "checkpoint/hub/repository.py": "the headers of a repository, in a temporary directory",
    "checkpoint/output/journal.py": "appends to the journal, and reads it",
    "checkpoint/output/lock.py": "the lock",
    "calibrate/data/pictures.py": "images, by the library that decodes them",
    "cli/commands/doctor.py": "what NVIDIA's driver says of itself",
    "cli/threads.py": "what the kernel says of cores and their limits",
    "cli/main.py": "/dev/null for a stdout that nobody reads",
    "cli/files.py": "whether results can be written, and those for /dev/stdout or a pipe",
    "cli/commands/publish.py": "reads a card",
    "bench/figures.py": "reads figures",
    "bench/machine.py": "/proc",
    "kernels/tuning/store.py": "reads tile tables",
    "publish/measurements.py": "reads figures and plots",
    "targets/gguf.py": "the header of a GGUF file, which the package gguf makes in a temporary directory",
}
_OPENING = re.compile(
    r"\bopen\(|\.(read_bytes|read_text|write_bytes|write_text|touch)\(|memmap\(|fromfile\(|tofile\("
    r"|save_file\(|safe_open\(|torch\.(save|load)\(|copyfile\("
)
_NO_FILE = re.compile(r"(Checkpoint|OutputDirectory|LoraAdapter|Subject|cls)\.open\(")


def opens(path: Path) -> bool:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = (f"{ast.unparse(node.func)}(" for node in ast.walk(tree) if isinstance(node, ast.Call))
    return any(_OPENING.search(call) and not _NO_FILE.search(call) for call in calls)


def test_files_are_opened_in_few_places() -> None:
    package = Path(quantkit.__file__).parent
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if opens(path)}
    assert found - {"files.py"} == OPENERS.keys()

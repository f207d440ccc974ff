"""`quantkit tune`: the fastest kernels and tiles on this GPU, into a table that later runs use."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import options, parsing
from quantkit.cli.console import note, print_json, print_table, progress, say
from quantkit.cli.records import with_fields
from quantkit.errors import EnvironmentProblem, KernelError, UsageError, unknown_name

if TYPE_CHECKING:
    from quantkit.kernels.problem import Gpu
    from quantkit.kernels.tuning.search import Search, Weight
    from quantkit.kernels.tuning.tile_table import Entry, Key, TileTable

#: Rows of x: decoding, batches, prompts. Above, the rules choose.
ROWS_OF_X = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096"


@dataclass(frozen=True)
class TuneArguments:
    """The command line of `tune`, an option per field.

    shapes              instead of DIR, shapes, comma-separated: llama3-8b, llama3-8b.down or 4096x14336
    formats             with --shapes, formats, comma-separated: int4, or int4:64 for groups of 64
    dtype               of activations: bfloat16 or float16
    fp16_accumulation   with float16, for runs that set torch's allow_fp16_accumulation: try float16 sums too
    kernels             kernels whose tiles are searched, comma-separated; others compete as they are
    passes              passes over tiles next to the best so far; each finds less
    jobs                processes that compile
    """

    shapes: Annotated[str | None, typer.Option()] = None
    formats: Annotated[str, typer.Option()] = "int8,int4"
    m: options.RowsOfX = ROWS_OF_X
    dtype: Annotated[str, typer.Option()] = "bfloat16"
    fp16_accumulation: Annotated[bool, typer.Option("--fp16-accumulation")] = False
    kernels: Annotated[str | None, typer.Option(show_default="all")] = None
    passes: Annotated[int, typer.Option(min=0)] = 1
    jobs: Annotated[int | None, typer.Option(min=1, show_default="one less than there are cores")] = None
    json: options.Json = False


@with_fields
def tune(
    given: TuneArguments,
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            exists=True,
            file_okay=False,
            readable=False,
            help="A packed checkpoint directory to tune for.",
        ),
    ] = None,
) -> None:
    """Measure which kernels and tiles are fastest on this GPU.

    Writes them to a table in the cache directory, which later runs use. It is safe to delete, and what is
    found is kept when this is interrupted.
    """
    from quantkit.kernels.jit.compile_pool import cores
    from quantkit.kernels.registry import forget_tile_tables
    from quantkit.kernels.report import device_kernels
    from quantkit.kernels.tuning.gpu_bench import CompilePool, gpu_bench, gpu_target
    from quantkit.kernels.tuning.search import Setting, search, tunable_kernels
    from quantkit.kernels.tuning.tile_table import bucket

    weights = _weights(directory, given)
    # The entry of a power of two is that of the numbers below it too.
    rows_of_x = sorted({bucket(number) for number in parsing.parse_rows_of_x(given.m)})
    searched = _searched(given.kernels)
    gpu, features = _gpu()
    tuning = _Tuning.begin(gpu)
    for weight in weights:
        problem = weight.problem(1, gpu, features)
        if not tunable_kernels(problem):
            last = [kernel for kernel in device_kernels(problem.device) if kernel.layout is not None][-1]
            reason = last.why_unsupported(problem)
            note(f"{weight}: there is nothing to tune, because {last.name} does not run it: {reason}.")
    with CompilePool(given.jobs or max(1, cores() - 1), gpu_target()) as pool, progress("tuning") as report:

        def advance(number: int, done: int, total: int, label: str) -> None:
            report(done, max(total, 1), f"pass {number + 1} of {given.passes + 1}: {label}" if label else "")

        setting = Setting(gpu, features, gpu_bench, pool, given.passes, advance, searched)
        for searches in search(weights, rows_of_x, tuning.known, setting):
            tuning.store(searches)
    forget_tile_tables()
    if given.json:
        found = [_as_json(one) for one in tuning.found.values()]
        print_json({"table": str(tuning.path), "gpu": gpu.name, "measured": found})
    else:
        _print(list(tuning.found.values()), tuning.path)


@dataclass
class _Tuning:
    """The user's table while it grows, and what was known before."""

    table: "TileTable"
    path: Path
    known: "dict[Key, Entry]"
    found: "dict[Key, Search]" = field(default_factory=dict)

    @classmethod
    def begin(cls, gpu: "Gpu") -> "_Tuning":
        """Read the tables there are, and write the user's: an error of that comes before measuring."""
        from quantkit.kernels.registry import KERNELS
        from quantkit.kernels.tuning.store import save, shipped_tables, user_table
        from quantkit.kernels.tuning.tile_table import TileTable

        versions = _versions()
        try:
            table = user_table(gpu, KERNELS)
        except KernelError as error:
            note(f"{error} It is replaced.")
            table = None
        if table is not None and table.made_with != versions:
            made_with = ", ".join(f"{name} {version}" for name, version in table.made_with.items())
            note(f"the {len(table.entries)} entries of your tile table are dropped: made with {made_with}.")
            table = None
        table = table or TileTable(gpu, versions, {})
        known = {
            key: entry
            for one in reversed((table, *shipped_tables(gpu, KERNELS)))
            for key, entry in one.entries.items()
        }
        return cls(table, save(table, KERNELS), known)

    def store(self, searches: "Sequence[Search]") -> None:
        """Write what is known of a weight by now."""
        from quantkit.kernels.registry import KERNELS
        from quantkit.kernels.tuning.store import save
        from quantkit.kernels.tuning.tile_table import Key

        self.found |= {Key.of(one.problem): one for one in searches}
        entries = {Key.of(one.problem): one.entry() for one in searches}
        self.table = self.table.with_entries(
            {key: entry for key, entry in entries.items() if entry is not None}
        )
        save(self.table, KERNELS)


def _versions() -> dict[str, str]:
    import torch
    import triton

    from quantkit import __version__

    return {"quantkit": __version__, "torch": torch.__version__, "triton": triton.__version__}


def _gpu() -> "tuple[Gpu, frozenset[str]]":
    import torch

    from quantkit.kernels.problem import device_features, gpu_of

    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
    if gpu is None:
        raise EnvironmentProblem(
            "there is no GPU to measure on: torch finds no device. Run `quantkit tune` where the model will "
            "run; `quantkit doctor` shows what is there."
        )
    features = device_features("cuda")
    if "triton" not in features:
        raise EnvironmentProblem(
            "Triton is not installed, so there are no tiles to tune; pip install triton."
        )
    return gpu, features


def _searched(names: str | None) -> frozenset[str] | None:
    """The rows of the table that `--kernels` names."""
    from quantkit.kernels.registry import KERNELS

    if names is None:
        return None
    known = [row.name for row in KERNELS if row.tile_space is not None]
    found = parsing.parse_list(names, "--kernels")
    if unknown := [name for name in found if name not in known]:
        raise unknown_name("kernel with tiles", unknown[0], known)
    return frozenset(found)


def _weights(directory: Path | None, given: TuneArguments) -> "list[Weight]":
    """What to tune for, each weight once."""
    from quantkit.kernels.tuning.search import LIMITS, Weight
    from quantkit.kernels.tuning.shapes import shapes_named
    from quantkit.kernels.tuning.tile_table import as_computed
    from quantkit.packing.schemes import scheme
    from quantkit.recipes.recipe import parse_group_size
    from quantkit.runtime.weights import packed_weights

    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in LIMITS}
    dtype, fp16_accumulation = given.dtype, given.fp16_accumulation
    if dtype not in dtypes:
        raise UsageError(f"--dtype is {dtype!r}; kernels with tiles take {' or '.join(dtypes)}.")
    if fp16_accumulation and dtype != "float16":
        raise UsageError(f"--fp16-accumulation is for --dtype float16, not {dtype}.")
    if (directory is None) == (given.shapes is None):
        raise UsageError("name a packed checkpoint directory to tune for, or --shapes such as llama3-8b.")
    if directory is not None:
        pairs = [(one, shape) for one, shape in packed_weights(directory)]
    else:
        assert given.shapes is not None
        schemes = []
        for name in parsing.parse_list(given.formats, "--formats"):
            number_format, _, size = name.partition(":")
            schemes.append(scheme(number_format, group_size=parse_group_size(size or None)))
        named = dict.fromkeys(shapes_named(parsing.parse_list(given.shapes, "--shapes")).values())
        pairs = [(one, shape) for shape in named for one in schemes]
    weights = [
        Weight(as_computed(one, shape[1]), *shape, dtypes[dtype], fp16_accumulation) for one, shape in pairs
    ]
    return list(dict.fromkeys(weights))


def _as_json(one: "Search") -> dict[str, Any]:
    entry, problem = one.entry(), one.problem
    return {
        "scheme": str(problem.scheme),
        "dtype": str(problem.dtype).removeprefix("torch."),
        "fp16_accumulation": problem.fp16_accumulation,
        "n": problem.n,
        "k": problem.k,
        "m": problem.m,
        "fastest": None if entry is None else {"kernel": str(entry), "us": entry.us},
        "rules": {"kernel": str(one.rules), "us": one.fine.get(one.rules)},
        "measured": {str(candidate): us for candidate, us in one.coarse.items()},
        "rejected": {str(candidate): reason for candidate, reason in one.rejected.items()},
    }


def _print(found: "Sequence[Search]", path: Path) -> None:
    """What got faster than by the rules and how much, and what may not be used."""
    for one in found:
        for candidate in one.wrong:
            note(f"{one.problem}: {candidate} is not used: {one.rejected[candidate]}.")
    gains = [(one, gain) for one in found if (gain := one.gain) is not None and gain > 1]
    if gains:
        headings, table = ("weight", "NxK", "M", "by rules", "fastest", "gain", "kernel"), []
        for one, gain in gains:
            entry, problem = one.entry(), one.problem
            assert entry is not None
            cells = (
                str(problem.scheme),
                f"{problem.n}x{problem.k}",
                str(problem.m),
                f"{one.fine[one.rules]:.1f} us",
                f"{entry.us:.1f} us",
                f"{gain:.2f}x",
                str(entry),
            )
            table.append(cells)
        print_table(headings, table, words=("weight", "kernel"))
    say(f"{len(found)} problems measured, {len(gains)} faster than by the rules; wrote {path}")

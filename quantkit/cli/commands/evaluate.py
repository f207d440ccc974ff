"""`quantkit eval`: perplexity, divergence from the original, tasks, and honest bits."""

import json as json_module
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from quantkit.about import pip_install
from quantkit.cli import completion, options, parsing
from quantkit.cli.choices import DTYPES
from quantkit.cli.console import fail, note, progress, say
from quantkit.cli.files import (
    REPORT_FILES,
    FiguresFile,
    ReportDirectory,
    check_writable,
    make_directory,
    write_file,
)
from quantkit.cli.plots import note_without_plots
from quantkit.cli.records import Documents, with_fields
from quantkit.errors import EnvironmentProblem, QuantkitError, UsageError, explained
from quantkit.eval.eval_options import EvalOptions
from quantkit.signals import advising

if TYPE_CHECKING:
    from quantkit.eval.results import EvalReport


@dataclass(frozen=True)
class EvalArguments:
    """The command line of `eval`, an option per field. `EvalOptions` documents the rest.

    text        UTF-8 text to score; repeatable
    task_path   folder of task files of your own
    limit       examples per task
    work        keep what is done here until all is: the same command then goes on after an interruption
    """

    library: ClassVar[tuple[type, ...]] = (EvalOptions,)

    against: Annotated[str | None, typer.Option()] = None
    text: Annotated[list[Path] | None, typer.Option(metavar="FILE")] = None
    own_text: Annotated[int | None, typer.Option(metavar="N", min=1)] = None
    tasks: Annotated[str | None, typer.Option(metavar="NAME,...")] = None
    task_path: Annotated[Path | None, typer.Option(metavar="DIR")] = None
    limit: Annotated[int | None, typer.Option(min=1, show_default="all")] = None
    window: Annotated[int, typer.Option(min=2)] = EvalOptions.window
    stride: Annotated[int | None, typer.Option(min=1, show_default="a window")] = None
    max_windows: Annotated[int | None, typer.Option(min=1, show_default="all")] = None
    dtype: Annotated[str, typer.Option(autocompletion=completion.names("auto", *DTYPES))] = EvalOptions.dtype
    kv_cache: options.KvCache = None
    device: options.Device = EvalOptions.device
    batch: Annotated[int, typer.Option(min=1)] = EvalOptions.batch
    noise_floor: Annotated[
        bool | None, typer.Option("--noise-floor/--no-noise-floor", show_default="with --report")
    ] = None
    per_block: Annotated[
        bool | None, typer.Option("--per-block/--no-per-block", show_default="with --report and --text")
    ] = None
    logits_space: Annotated[str, typer.Option(metavar="SIZE"), Documents("budget_bytes")] = (
        parsing.shown_size(EvalOptions.budget_bytes)
    )
    work: Annotated[
        Path | None, typer.Option(metavar="DIR", readable=False, show_default="that of --report")
    ] = None
    verbose: options.Verbose = False
    json: FiguresFile = None
    report: ReportDirectory = None

    @property
    def task_names(self) -> tuple[str, ...]:
        """Each of `tasks` once."""
        return () if self.tasks is None else tuple(parsing.parse_list(self.tasks, "--tasks"))

    def check(self) -> None:
        """Refuse at once what would fail, or be ignored, after the work."""
        names = self.task_names
        if not self.text and not names and not self.own_text:
            raise UsageError("nothing to evaluate: give --text FILE (repeatable), --tasks NAMES, or both.")
        if self.own_text and not self.against:
            raise UsageError("--own-text is what the original writes: give --against as well.")
        if self.noise_floor and not self.against:
            raise UsageError("--noise-floor is of the original: give --against as well.")
        if self.per_block and not (self.text and self.against):
            raise UsageError("--per-block is of the original on texts: give --against and --text as well.")
        if self.task_path is not None and not names:
            raise UsageError("--task-path has task files but none is to run: name them with --tasks.")
        if self.limit is not None and not names:
            raise UsageError(
                "--limit is of tasks and none is to run: name them with --tasks, or use --max-windows for "
                "texts."
            )
        if names and find_spec("lm_eval") is None:
            raise EnvironmentProblem(f"--tasks needs lm-eval. Install it with {pip_install('eval')}.")

    def to_options(self) -> EvalOptions:
        """The options of the evaluation; a report on a comparison adds noise floor and losses of blocks."""
        from quantkit.eval.tasks import Tasks

        names, comparing = self.task_names, bool(self.report and self.against)
        return EvalOptions(
            texts=tuple(self.text or ()),
            tasks=Tasks(names, self.limit, self.task_path, self.batch) if names else None,
            against=self.against,
            window=self.window,
            stride=self.stride,
            max_windows=self.max_windows,
            dtype=self.dtype,
            kv_cache=self.kv_cache,
            device=self.device,
            batch=self.batch,
            noise_floor=comparing if self.noise_floor is None else self.noise_floor,
            own_text=self.own_text or 0,
            per_block=bool(comparing and self.text) if self.per_block is None else self.per_block,
            budget_bytes=parsing.parse_size(self.logits_space),
        )


@with_fields
def evaluate(directories: options.Models, given: EvalArguments) -> None:
    """Measure models on texts and tasks, and compare them.

    With --against, each text is also scored by the original: the excess is the logarithm of perplexity over
    the original's, KL the divergence of the next-token distributions, both in nats per token.
    """
    given.check()
    if given.report is not None:
        make_directory(given.report, REPORT_FILES)
        note_without_plots()
    from quantkit.cli.figures import print_reports
    from quantkit.cli.models import log_kernels
    from quantkit.eval.evaluate import evaluate_many
    from quantkit.eval.result_cache import Partial
    from quantkit.runtime.transformers.quiet import silence

    if given.verbose:
        log_kernels()
    # Before hours of work, not after.
    if given.json is not None:
        check_writable(given.json)
    place = given.work or given.report
    partial = None if place is None else Partial(place)

    def advice() -> str | None:
        if partial is None or not partial.directory.is_dir():
            return None
        return f"what is done so far is in {partial.directory}; the same command goes on from there"

    failures: list[QuantkitError] = []

    def failed(model: str, error: QuantkitError) -> None:
        # What is wrong with a text is wrong for every model.
        if str(error) not in map(str, failures):
            failures.append(error)

    with advising(advice), progress("evaluating") as advance:
        silence()
        # The only model has no others to keep its error from.
        results = evaluate_many(
            directories,
            given.to_options(),
            partial=partial,
            progress=advance,
            on_failure=failed if len(directories) > 1 else None,
        )
    if results:
        print_reports(results)
        _write(given, results)
    for error in failures[:-1]:
        fail(explained(error))
    if failures:
        raise failures[-1]
    if partial is not None and (left := partial.remove()) is not None:
        note(left)


def _write(given: EvalArguments, results: Sequence["EvalReport"]) -> None:
    """Write the files that were asked for."""
    from quantkit.report.eval_report import write_report

    if given.json is not None:
        write_file(given.json, _figures(results))
        say(f"wrote {given.json}")
    if given.report is not None:
        write_report(given.report, results, shlex.join(["quantkit", *sys.argv[1:]]))
        say(f"wrote {given.report / 'report.html'}")


def _figures(results: Sequence["EvalReport"]) -> str:
    """One model's figures as an object, those of several as `reports`."""
    if len(results) == 1:
        return results[0].to_json()
    content = {"reports": [result.to_dict() for result in results]}
    return json_module.dumps(content, indent=2, allow_nan=False) + "\n"

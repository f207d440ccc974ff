"""Present evaluations: tables, a verdict per model, and loss against bits per weight."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.checkpoint.output.atomic_write import hash_file
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError, first_of
from quantkit.escaping import Code, Prose
from quantkit.eval.metrics import TextMetrics
from quantkit.eval.own_text import alike_at_start
from quantkit.eval.rating import VERDICTS, verdict, verdict_line
from quantkit.eval.results import EvalReport
from quantkit.files import size_text
from quantkit.report.document import Bullets, Command, Document, Passages, Section, Table, Text, write
from quantkit.report.eval_plots import figures, labelled
from quantkit.report.made import Made, made_here
from quantkit.report.tables import (
    TASK_EXPLANATION,
    change_text,
    error_text,
    number_text,
    percent_text,
    ratio_text,
    task_table,
)

VERSION = 1

#: Name of the report's files, without suffix.
STEM = "report"


def write_report(
    directory: Path | str, reports: Sequence[EvalReport], command: str | None = None
) -> tuple[Path, ...]:
    """Write report.md, report.html, report.json and, with matplotlib, the plots; return the files.

    `command` is the command typed. report.json includes the hashes of the models' files. Raises `UsageError`
    without reports, `OutputError` if a file cannot be written.
    """
    if not reports:
        raise UsageError("there is nothing to report. Evaluate at least one model.")
    content = {
        "version": VERSION,
        "command": command,
        "reports": [report.to_dict() for report in reports],
        "sha256": {str(model): hashes(model) for model in _models(reports)},
    }
    return write(
        Path(directory),
        STEM,
        document(reports, command, made_here(reports[0].device)),
        {f"{STEM}.json": json.dumps(content, indent=2, allow_nan=False) + "\n"},
    )


def hashes(directory: Path) -> dict[str, str]:
    """Return the hex SHA-256 of a model's configuration and weights, on which its figures depend."""
    if directory.is_file():
        return {directory.name: hash_file(directory)}
    return {path.name: hash_file(path) for path in Checkpoint.open(directory).stamps}


def document(reports: Sequence[EvalReport], command: str | None = None, made: Made | None = None) -> Document:
    """Return the report: the losses in words, tables, plots, and how they were measured.

    `made` is the date and machine, for the line below the title.
    """
    texts = list(reports[0].texts)
    drawn, missing = figures(reports)
    words = [verdict_line(report) for report in reports if report.texts]
    sections = [
        *([Section("In words", [Bullets(words)])] if words else []),
        Section("Models", [_model_table(reports)]),
        *(Section(f"Text: {name}", [_text_table(reports, name)]) for name in texts),
    ]
    if any(report.tasks for report in reports):
        sections.append(
            Section(
                "Tasks",
                [
                    task_table([(label, one.tasks) for label, one in labelled(reports)]),
                    Text(TASK_EXPLANATION),
                ],
            )
        )
    if any(report.own_text for report in reports):
        sections.append(Section("Texts that they write", _written(reports)))
    sections.append(Section("Plots", [*drawn, *([] if missing is None else [Text(missing)])]))
    if texts:
        sections.append(Section("What the figures are", [Text(_EXPLANATION), _verdict_table()]))
    sections.append(Section("How it was measured", _provenance(reports, command)))
    return Document(_title(reports), sections, "" if made is None else made.text)


def _title(reports: Sequence[EvalReport]) -> str:
    """Return the names of the models, or of the first few, and of the original."""
    names = first_of((report.label for report in reports), 3)
    against = reports[0].against
    return f"Accuracy of {names}" + ("" if against is None else f" beside {Path(against).name}")


_EXPLANATION = (
    "Perplexity is exp of the mean negative log likelihood of the predicted tokens; beside it the multiple "
    "of the original's. Excess is the logarithm of that multiple. KL is the divergence of the next-token "
    "distribution from the reference's, over tokens: mean, 99th percentile and the largest; report.json "
    "has more. Both are in nats. RMS Δp is the root mean square of the difference in probability of the "
    "text's tokens. ± is one standard error with a window as one draw, paired with the reference. Same "
    "top-1 is how often both models find the same token the most likely. The noise floor is the reference "
    "against itself in another dtype: a difference as small is none. Texts are tokenized as one stream "
    "without a BOS token and cut into windows that start a stride apart; the last stride tokens of a "
    "window are scored, never its first. Bits per weight count all stored bytes: words, padding, scales, "
    "zero-points and shapes."
)


def _models(reports: Sequence[EvalReport]) -> list[Path]:
    """Return the directories of all models, the references last."""
    found = [report.model for report in reports]
    found += [report.against for report in reports if report.against is not None]
    return [Path(model) for model in dict.fromkeys(found)]


def _model_table(reports: Sequence[EvalReport]) -> Table:
    """Return a table with a row per model, and last the original."""
    headings = ["model", "verdict", "format", "method", "bits/weight linears", "bits/weight model", "size"]
    first = reports[0]
    original = first.reference_sizes
    if original is not None:
        headings.append("of original")
    rows: list[Sequence[str]] = []
    for report in reports:
        found, sizes = verdict(report), report.sizes
        row = (
            report.label,
            "-" if found is None else found.word,
            sizes.format,
            sizes.method or "-",
            number_text(sizes.linears, ".3f"),
            number_text(sizes.model, ".3f"),
            size_text(sizes.nbytes),
        )
        rows.append(row if original is None else (*row, ratio_text(sizes.nbytes, original.nbytes)))
    if original is not None:
        bits = (number_text(original.linears, ".3f"), number_text(original.model, ".3f"))
        name = Path(first.against or "").name
        rows.append((name, "original", original.format, "-", *bits, size_text(original.nbytes), "1.00x"))
    return Table(headings, rows, frozenset(headings[:4]))


@dataclass(frozen=True)
class _Column:
    """Figure of a text: its heading, its format, and True if it needs a reference."""

    heading: str
    cell: Callable[[TextMetrics], str]
    compared: bool = True


_COLUMNS = (
    _Column(
        "perplexity",
        lambda m: f"e^{m.nll:.6g}" if m.perplexity is None else f"{m.perplexity:.6g}",
        compared=False,
    ),
    _Column("of original", lambda m: "-" if m.excess is None else change_text(m.excess)),
    _Column("excess", lambda m: number_text(m.excess, "+.5f") + error_text(m.excess_se)),
    _Column("KL mean", lambda m: number_text(m.kl_mean, ".3g") + error_text(m.kl_mean_se)),
    _Column("KL p99", lambda m: number_text(m.kl_p99, ".3g") + error_text(m.kl_p99_se)),
    _Column("KL max", lambda m: number_text(m.kl_max, ".3g")),
    _Column("same top-1", lambda m: percent_text(m.same_top1)),
    _Column("RMS Δp", lambda m: percent_text(m.rms_dp)),
)


def _text_table(reports: Sequence[EvalReport], text: str) -> Table:
    """Return a table with a row per model, the reference, and its noise floor."""
    first = reports[0]
    columns = [column for column in _COLUMNS if first.against is not None or not column.compared]
    rows = [
        (label, *(column.cell(one.texts[text]) for column in columns)) for label, one in labelled(reports)
    ]
    reference = first.texts[text].reference_perplexity
    if reference is not None:
        rows.append((Path(first.against or "").name, f"{reference:.6g}", *["-"] * (len(columns) - 1)))
    return Table(("model", *(column.heading for column in columns)), rows, frozenset({"model"}))


#: Most characters of a text in the report.
_LONGEST = 400


def _written(reports: Sequence[EvalReport]) -> list[Table | Text | Passages]:
    """Return the counts of what models write, and some of it beside the original's."""
    original = Path(reports[0].against or "").name
    counts = [(report.label, way, one.model) for report in reports for way, one in report.own_text.items()]
    counts += [(original, way, one.original) for way, one in reports[0].own_text.items()]
    rows = [
        (label, way, f"{one.tokens:.0f}", percent_text(one.ended), percent_text(one.repeated))
        for label, way, one in counts
    ]
    headings = ("model", "written", "tokens", "ended", "repeated")
    found: list[Table | Text | Passages] = [Table(headings, rows, frozenset(headings[:2])), Text(_WRITTEN)]
    for label, way, pairs in ((one.label, *row) for one in reports for row in one.own_text.items()):
        texts = [
            (f"{at}. {_shortened(one.beginning)}", _shortened(one.original), _shortened(one.model))
            for at, one in enumerate(pairs.pairs, 1)
        ]
        if texts:
            alike = [alike_at_start(*row[1:]) for row in texts]
            count = f"{len(texts)} {'text' if len(texts) == 1 else 'texts'}"
            title = f"{count} of {label} beside {original}'s, {way}"
            found.append(Passages(title, ("beginning", original, label), texts, alike))
    return found


_WRITTEN = (
    "Each model goes on from the same beginnings: sampled, with the same random numbers, and greedily, by "
    "the likeliest token. Tokens are the mean up to the end of a text, ended are texts that end, and "
    "repeated are runs of four tokens that their text had before. Of each text the first "
    f"{_LONGEST} characters are shown; a printed page has none. What both write alike is paler. report.json "
    "has all."
)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _verdict_table() -> Table:
    return Table(
        ("verdict", "KL mean up to", "excess up to", "meaning"),
        [(v.word, _limit(v.kl_mean), _limit(v.excess), v.meaning) for v in VERDICTS],
        frozenset({"verdict", "meaning"}),
    )


def _provenance(reports: Sequence[EvalReport], command: str | None) -> list[Command | Bullets]:
    lines: list[Prose] = []
    for report in reports:
        against = ("no reference",) if report.against is None else ("against ", Code(report.against))
        count = "".join(f"; {name} {m.tokens} tokens" for name, m in report.texts.items())
        windows = f"; windows of {report.window}, {report.stride} apart" if report.texts else ""
        how = (
            f"{count}{windows}; {report.batch} at a time; {report.dtype} on {report.device}; "
            f"quantkit {report.versions.quantkit_version}, torch {report.versions.torch}, "
            f"transformers {report.versions.transformers}; {report.seconds:.1f} s."
        )
        lines.append((f"{report.label}: ", Code(report.model), " ", *against, how))
    size = reports[0].reference_logits
    if size:
        lines.append(
            f"The reference's logits, all of them in float32, took {size_text(size)} on disk at a time and "
            f"{reports[0].reference_seconds:.1f} s."
        )
    lines += dict.fromkeys(note for report in reports for note in report.notes)
    return [*([] if command is None else [Command(command)]), Bullets(lines)]


def _limit(value: float) -> str:
    return "any" if math.isinf(value) else f"{value:g}"

"""Tables of docs/guide/known-models.md: a model from 8 bits to 1, and how fast it decodes.

`known_models.py` and `known_speed.py` make what they show; `guide_pages.py` writes them.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from performance_page import RESULTS, grid, paragraph, stored


def perplexity(value: float) -> str:
    """Two digits, and of a model that knows nothing any more three in all."""
    return f"{value:.2f}" if value < 1000 else f"{value:.3g}"


def runs_of(name: str) -> list[dict[str, Any]]:
    """The stored runs of `known_models.py` of a model: `NAME.json`, and `NAME-*.json` of other rows."""
    return [stored(f"known-models/{stem}") for stem in KNOWN[name]]


def known(name: str) -> str:
    """Every row of the runs of a model, from 8 bits to 1, and the original."""
    runs = runs_of(name)
    texts = list(runs[0]["rows"][0]["texts"])
    of_texts = " / ".join(text.partition(".")[0] for text in texts)
    original = runs[0]["original"]
    heads = ("format", "bits, linears", "size", f"perplexity, {of_texts}", "KL mean", "same top-1 token")
    # What was run again counts as it was last.
    rows = {row["label"]: row for run in runs for row in run["rows"]}
    cells = [list(heads)]
    for row in sorted(rows.values(), key=lambda row: -row["bits_per_weight"]):
        found = [row["texts"][text] for text in texts]
        size = "" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f} MB"
        cells.append(
            [
                row["label"],
                f"{row['bits_per_weight']:.3f}",
                size,
                " / ".join(perplexity(one["perplexity"]) for one in found),
                " / ".join(f"{one['kl_mean']:.3g} ± {one['kl_mean_se']:.1g}" for one in found),
                " / ".join(f"{100 * one['same_top1']:.1f}" for one in found) + " %",
            ]
        )
    first = runs[0]["rows"][0]["texts"]
    before = " / ".join(perplexity(first[text]["reference_perplexity"]) for text in texts)
    size = f"{original['bytes'] / 1e6:.1f} MB"
    return grid([*cells, ["original", f"{original['bits']:g}", size, before, "0", "100 %"]])


def known_how(name: str) -> str:
    """How the rows of a model were measured, a line for each run."""
    first, *others = runs_of(name)
    lines = [paragraph(first["about"], first["how"], f"By `{first['command']}` on {first['machine']}.")]
    for run in others:
        how = [] if run["how"] == first["how"] else [run["how"]]
        lines.append(paragraph(run["about"], *how, f"By `{run['command']}` on {run['machine']}."))
    return "\n".join(lines)


def known_notes(name: str) -> str:
    """What of a model did not run, and the versions of peers."""
    runs = runs_of(name)
    labels = [{row["label"] for row in run["rows"]} for run in runs]
    # A row that one run lacks may be in another.
    notes = dict.fromkeys(
        note
        for run, own in zip(runs, labels, strict=True)
        for note in run["notes"]
        if note.partition(": ")[0] not in set().union(*labels) - own
    )
    mark = ": not run"
    left = ", ".join(note.removesuffix(mark) for note in notes if note.endswith(mark))
    others = [note for note in notes if not note.endswith(mark)]
    return "\n".join(f"- {note}" for note in ([f"rows not run: {left}"] if left else []) + others)


def speed_runs() -> list[dict[str, Any]]:
    """The stored runs of `known_speed.py`, those of small models first. A model may have several."""
    paths = sorted((RESULTS / "known-speed").glob("*.json"))
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return sorted(runs, key=lambda run: int(run["rows"][0]["bytes"]))


def known_speed() -> str:
    """Size and decoding of each width beside the original of its run: the largest first, by model."""
    runs = speed_runs()
    if not runs:
        return "No run is stored."
    batches = [cell["batch"] for cell in runs[0]["rows"][0]["decode"]]
    cells = [["model", "format", "size", "of original"]]
    for batch in batches:
        cells[0] += [f"tokens/s, batch {batch}", "of original"]
    for model in dict.fromkeys(run["model"] for run in runs):
        rows = {
            row["label"]: (row, run["rows"][0])
            for run in runs
            if run["model"] == model
            for row in run["rows"]
        }
        original = rows.pop("original")
        for row, before in (*sorted(rows.values(), key=lambda pair: -pair[0]["bytes"]), original):
            size = f"{row['bytes'] / 1e6:,.1f} MB"
            line = [model, row["label"], size, f"{row['bytes'] / before['bytes']:.2f}x"]
            found, dense = (
                {cell["batch"]: cell["median"] for cell in one["decode"]} for one in (row, before)
            )
            for batch in batches:
                known = batch in found and batch in dense
                line += [f"{found[batch]:,.0f}", f"{found[batch] / dense[batch]:.2f}x"] if known else ["", ""]
            cells.append(line)
    return grid(cells)


def known_speed_how() -> str:
    """How decoding of each width was timed, a line for each run."""
    lines = [
        paragraph(
            f"{run['model']}: {run['new_tokens']} tokens after {run['prompt']}, greedy, in mode",
            f"{run['rows'][0]['decode'][0]['mode']}. By `{run['command']}` on {run['machine']}.",
        )
        for run in speed_runs()
    ]
    return "\n".join(lines) or "None."


def by_model() -> dict[str, list[str]]:
    """The stored runs by model: the shortest name, and with it the others, in order."""
    found: dict[str, list[str]] = {}
    for path in sorted((RESULTS / "known-models").glob("*.json"), key=lambda path: (len(path.stem), path)):
        main = next((name for name in found if path.stem.startswith(f"{name}-")), path.stem)
        found.setdefault(main, []).append(path.stem)
    return found


#: Models whose rows from 8 bits to 1 are stored, and the names of their runs.
KNOWN = by_model()
#: What the page asks for by name.
PARTS: Mapping[str, Callable[[], str]] = {
    **{f"known-{name}": partial(known, name) for name in KNOWN},
    **{f"known-{name}-how": partial(known_how, name) for name in KNOWN},
    **{f"known-{name}-notes": partial(known_notes, name) for name in KNOWN},
    "known-speed": known_speed,
    "known-speed-how": known_speed_how,
}

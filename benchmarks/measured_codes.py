"""What docs/guide/below-3-bits.md says of codes that no format has: low-rank binary, and trellis codes.

`low_rank_binary.py`, `trellis_decode.py` and `trellis_error.py` measure; `guide_pages.py` writes the page.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from performance_page import RESULTS, grid, paragraph, stored

LOW_RANK, DECODE, ERRORS = "guide/low-rank-binary", "guide/trellis-decode", "guide/trellis-error"
TRAINED = "guide/low-rank-trained"
#: What pages call the codes of `trellis_kernel.py`.
CODES = {
    "int2": "int2",
    "trellis": "trellis, a hash per weight (QTIP's 3INST)",
    "pairs": "trellis, a hash per two weights",
}


def low_rank() -> str:
    """Errors and divergence of low-rank binary beside planes, at equal bits."""
    heads = ("linears of", "way", "bits", "error of weights", "weighted by inputs", "of outputs", "KL")
    cells = [list(heads)]
    for run in stored(LOW_RANK)["runs"]:
        for row in run["rows"]:
            found = [f"{row[key]:.3f}" for key in ("weights", "weighted", "outputs")]
            loss = f"{row['kl']:.3f}" if "kl" in row else ""
            cells.append([run["about"], row["way"], f"{row['bits']:.3f}", *found, loss])
    return grid(cells)


def low_rank_run() -> str:
    """How low-rank binary was measured."""
    runs = stored(LOW_RANK)["runs"]
    return paragraph(*(f"By `{run['command']}` on {run['machine']}." for run in runs))


def low_rank_trained() -> str:
    """What low-rank binary and binary become by the same training."""
    (run,) = stored(TRAINED)["runs"]

    def pair(values: Sequence[float]) -> str:
        return " / ".join(f"{kl:.3f}" for kl in values)

    names = (f"{row['way'].partition(',')[0]} ({row['bits']:.3f} bits)" for row in run["rows"])
    found = (f"{pair(row['kl_start'])}, then {pair(row['kl'])}" for row in run["rows"])
    rows = "; ".join(map(" ".join, zip(names, found, strict=True)))
    steps = run["rows"][0]["steps"]
    return paragraph(
        f"KL on books / docs before and after {steps} steps of training on the same text: {rows}.",
        f"By `{run['command']}` on {run['machine']}.",
    )


def trellis() -> str:
    """Shares of the read floor, and errors of weights, by code."""
    errors, times = stored(ERRORS), stored_or_none(DECODE)
    shapes = list(times["shapes"]) if times else []
    cells = [["code, 2 bits", *errors["weights"], "instructions", *(f"{shape}, H200" for shape in shapes)]]
    for code, label in CODES.items():
        found = [f"{of_code[code]:.4f}" for of_code in errors["weights"].values()]
        speeds = [times["shapes"][shape]["codes"][code] for shape in shapes] if times else []
        cells.append(
            [
                label,
                *found,
                f"{errors['instructions'][code]:.2f}",
                *(f"{one['us']:.1f} µs, {one['share']:.0%}" for one in speeds),
            ]
        )
    return grid(cells)


def trellis_run() -> str:
    """How the codes were measured, and which part of the bandwidth they reach."""
    errors, times = stored(ERRORS), stored_or_none(DECODE)
    parts = [f"Errors by `{errors['command']}` on {errors['machine']}."]
    if times is None:
        return paragraph(*parts, "Times on a GPU are not stored yet.")
    reached = []
    for code, label in CODES.items():
        shares = [found["codes"][code]["share"] for found in times["shapes"].values()]
        reached.append(f"{label.removeprefix('trellis, ')} {min(shares):.0%} to {max(shares):.0%}")
    parts.insert(0, f"Of the bandwidth: {', '.join(reached)}.")
    return paragraph(*parts, f"Times by `{times['command']}` on {times['machine']}.")


def stored_or_none(name: str) -> dict[str, Any] | None:
    """Return a stored run, or None before it was made."""
    return stored(name) if (RESULTS / f"{name}.json").exists() else None


#: What the page asks for by name.
PARTS: Mapping[str, Callable[[], str]] = {
    "low-rank-binary": low_rank,
    "low-rank-binary-run": low_rank_run,
    "low-rank-trained": low_rank_trained,
    "trellis": trellis,
    "trellis-run": trellis_run,
}

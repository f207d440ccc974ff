"""`quantkit formats`: which formats there are, what their codes are worth, and what rounding costs."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli import completion, options
from quantkit.cli.console import print_json, print_table, progress, say
from quantkit.cli.plots import check_png, save
from quantkit.errors import UsageError
from quantkit.packing.presets import PRESETS
from quantkit.report.labels import name_points
from quantkit.report.plots import figure_class

if TYPE_CHECKING:
    from quantkit.calibrate.noise import Noise
    from quantkit.packing.formats import NumberFormat

#: Distributions of the noise table, as headings and as titles.
_DISTRIBUTIONS = {"gaussian": "Gaussian weights", "student_t": "Student-t weights, 5 degrees of freedom"}


def formats(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A format; all of them if left out.",
            autocompletion=completion.names(*PRESETS),
        ),
    ] = None,
    codes: Annotated[bool, typer.Option("--codes", help="Every code point of NAME and its value.")] = False,
    schemes: Annotated[
        bool,
        typer.Option("--schemes", help="Names of --scheme, and which engines read their linears."),
    ] = False,
    noise: Annotated[
        bool, typer.Option("--noise", help="Measure the relative squared error of every format.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="With --noise: also draw error against bits."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Show the number formats, their codes, or their noise.

    Bits per weight count all that is stored for a weight of 4096x4096, scales included. The kernel is the
    one that runs y = x W^T here for one row of x in bfloat16.
    """
    _check(name, codes, schemes, noise, plot)
    if schemes:
        _show_schemes(json)
    elif noise:
        _show_noise(plot, json)
    elif codes:
        assert name is not None
        _show_codes(name, json)
    else:
        _show_formats(name, json)


def _check(name: str | None, codes: bool, schemes: bool, noise: bool, plot: Path | None) -> None:
    """`UsageError` for options that do not go together, before anything is computed."""
    if schemes and (name is not None or codes or noise):
        raise UsageError("--schemes lists all schemes; leave out NAME, --codes and --noise.")
    if codes and name is None:
        raise UsageError("--codes needs the name of a format, such as `quantkit formats nf4 --codes`.")
    if noise and (name is not None or codes):
        raise UsageError("--noise measures every format; leave out NAME and --codes.")
    if plot is not None and not noise:
        raise UsageError("--plot draws what --noise measures; add --noise.")
    if plot is not None:
        check_png(plot)


def _show_schemes(json: bool) -> None:
    """Print the weights and inputs of each name of `--scheme`, and the engines that read such a linear."""
    from quantkit.checkpoint.compressed_tensors import compressed_tensors_format, why_not_compressed_tensors
    from quantkit.checkpoint.engine_support import readers
    from quantkit.packing.presets import SCHEMES
    from quantkit.packing.schemes import scheme

    rows = []
    for name, preset in SCHEMES.items():
        made = scheme(
            preset.format,
            group_size=preset.group_size,
            zero_point=preset.zero_point or "none",
            activations=preset.activations,
            packing=preset.packing,
        )
        row: dict[str, Any] = {"name": name, "weights": str(made.of_weights)}
        row["inputs"] = "as they are" if made.activations is None else str(made.activations)
        row["readers"] = []
        if why_not_compressed_tensors(made, 256) is None:
            stored = compressed_tensors_format(made, 256).stored_as("", "linear", made, (256, 256))
            row["readers"] = [engine.name for engine in readers(stored)]
        rows.append(row)
    if json:
        print_json(rows)
        return
    headings = ("scheme", "weights", "inputs", "read by")
    print_table(
        headings,
        [
            (row["name"], row["weights"], row["inputs"], ", ".join(row["readers"]) or "quantkit")
            for row in rows
        ],
        words=headings,
        narrow=True,
    )


def _show_formats(name: str | None, json: bool) -> None:
    from quantkit.packing.presets import PRESETS

    rows = [_describe(row) for row in (PRESETS if name is None else (name,))]
    if json:
        print_json(rows)
        return
    words = ("name", "numbers", "scale", "range", "kernel")
    headings = ("name", "numbers", "bits", "group", "scale", "range", "values", "kernel")
    table = [
        (
            row["name"],
            row["format"],
            f"{row['bits_per_weight']:.3f}",
            "channel" if row["group_size"] is None else str(row["group_size"]),
            row["scale_dtype"],
            f"{row['min']:g}..{row['max']:g}",
            str(row["values"]),
            row["kernel"] or "none",
        )
        for row in rows
    ]
    print_table(headings, table, words=words, narrow=True)


def _describe(name: str) -> dict[str, Any]:
    """One preset as JSON; `FormatError` lists the known ones."""
    import torch

    from quantkit.calibrate.noise import NOMINAL_SHAPE, bits_per_weight
    from quantkit.devices import best_device
    from quantkit.kernels.problem import Problem
    from quantkit.kernels.report import selection_of
    from quantkit.packing.schemes import scheme

    chosen, device = scheme(name), best_device()
    problem = Problem.on(device, 1, *NOMINAL_SHAPE, chosen, torch.bfloat16)
    return {
        "name": name,
        "format": chosen.format.name,
        "bits_per_weight": bits_per_weight(chosen),
        "group_size": chosen.group_size,
        "scale_dtype": chosen.scale_type.name,
        "global_scale": chosen.global_scale,
        "min": chosen.format.min,
        "max": chosen.format.max,
        "values": 2**chosen.code_bits if chosen.is_fitted else len(chosen.format.numbers) ** chosen.planes,
        "planes": chosen.planes,
        "column_scale": chosen.column_scale,
        "device": device.type,
        "kernel": selection_of(problem).kernel,
    }


def _show_codes(name: str, json: bool) -> None:
    from quantkit.packing.formats import FittedFormat, number_format
    from quantkit.packing.presets import PRESETS

    preset = PRESETS.get(name)
    chosen, planes = number_format(preset.format if preset else name), preset.planes if preset else 1
    bits, fitted = planes * chosen.bits, isinstance(chosen, FittedFormat)
    points = []
    for code in range(2**bits):
        parts = [code >> (plane * chosen.bits) & (2**chosen.bits - 1) for plane in range(planes)]
        points.append((code, f"{code:0{bits}b}", [chosen.values[part] for part in parts]))
    if json:
        rows = [
            {"code": code, "bits": digits, "value": values[0] if planes == 1 else values}
            for code, digits, plane_values in points
            for values in ([None if math.isnan(value) else value for value in plane_values],)
        ]
        print_json({"format": chosen.name, "bits": bits, "planes": planes, "fitted": fitted, "codes": rows})
        return
    say(_about_codes(chosen, planes, fitted))
    table = []
    unknown = "fitted" if fitted else "no number"
    for code, digits, plane_values in points:
        # 9 digits tell any two float32 apart.
        shown = (unknown if math.isnan(value) else f"{value:.9g}" for value in plane_values)
        table.append((str(code), digits, ", ".join(shown)))
    print_table(("code", "bits", "value"), table)


def _about_codes(chosen: "NumberFormat", planes: int, fitted: bool) -> str:
    if fitted:
        return f"{chosen.name}: {2**chosen.bits} numbers in {chosen.bits} bits, stored with each tensor"
    if planes == 1:
        return f"{chosen.name}: {len(chosen.numbers)} numbers in {chosen.bits} bits, in units of the scale"
    return (
        f"{chosen.name}: sums of {planes} numbers in {planes * chosen.bits} bits, plane 0 first, each in "
        "units of the scale of its plane"
    )


def _show_noise(plot: Path | None, json: bool) -> None:
    from quantkit.calibrate.noise import METHODS, SAMPLE_SHAPE, SEED, known_schemes, measure

    with progress("measuring") as report:
        noises = measure(known_schemes(), shape=SAMPLE_SHAPE, report=report)
    if plot is not None:
        _draw(plot, noises)
    if json:
        print_json(
            {
                "shape": SAMPLE_SHAPE,
                "seed": SEED,
                "schemes": [
                    {
                        "label": noise.label,
                        "scheme": noise.scheme.to_dict(),
                        "bits_per_weight": noise.bits_per_weight,
                        "relative_squared_error": noise.errors,
                    }
                    for noise in noises
                ],
            }
        )
        return
    rows, columns = SAMPLE_SHAPE
    say(
        f"relative squared error of {rows}x{columns} weights, seed {SEED}; t: Student-t, 5 degrees of freedom"
    )
    cases = [(method, name) for name in _DISTRIBUTIONS for method in METHODS]
    errors = [f"{name.removeprefix('student_')}\n{method}" for method, name in cases]
    table = [
        (
            one.label,
            f"{one.bits_per_weight:.3f}",
            *(f"{one.errors[method][name]:.3g}" for method, name in cases),
        )
        for one in noises
    ]
    print_table(("scheme", "bits", *errors), table, words=("scheme",))
    if plot is not None:
        say(f"wrote {plot}")


def _draw(path: Path, noises: Sequence["Noise"], method: str = "mse") -> None:
    """Write a PNG: for each distribution the error (logarithmic) of every scheme against its bits."""
    from quantkit.calibrate.noise import pareto_front

    figure = figure_class()(figsize=(9, 14), dpi=100, layout="constrained")
    panels = figure.subplots(len(_DISTRIBUTIONS), 1)
    for axes, (name, title) in zip(panels, _DISTRIBUTIONS.items(), strict=True):
        front = pareto_front(noises, method, name)
        lines = [_points(chosen, method, name) for chosen in (front, noises)]
        axes.plot(*zip(*lines[0], strict=True), color="tab:orange", label="Pareto front", zorder=1)
        axes.scatter(*zip(*lines[1], strict=True), s=18, color="tab:blue", zorder=2)
        axes.set(yscale="log", xlabel="bits per weight", ylabel="relative squared error", title=title)
        axes.margins(0.12, 0.08)
        axes.grid(alpha=0.3)
        axes.legend()
    for axes, name in zip(panels, _DISTRIBUTIONS, strict=True):
        lowest_first = sorted(noises, key=lambda noise: noise.errors[method][name])
        labels = [noise.label for noise in lowest_first]
        name_points(figure, axes, zip(labels, _points(lowest_first, method, name), strict=True))
    save(figure, path)


def _points(noises: Sequence["Noise"], method: str, name: str) -> list[tuple[float, float]]:
    return [(noise.bits_per_weight, noise.errors[method][name]) for noise in noises]

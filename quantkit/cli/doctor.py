"""`quantkit doctor`: what runs on this machine, and why the rest does not."""

import platform
from typing import Annotated, Any

import typer
from rich.table import Table

from quantkit.cli import options
from quantkit.cli.console import out, print_json

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "huggingface-hub", "accelerate", "lm-eval")


def doctor(
    every_reason: Annotated[
        bool, typer.Option("--all", help="Also why slower kernels are not used.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show versions, GPU, and per format and batch size which kernel runs here and why others do not."""
    packages, machine, kernels = _packages(), _machine(), _kernels()
    if json:
        print_json({"packages": packages, "machine": machine, "kernels": kernels})
        return
    for name, version in packages.items():
        out.print(f"{name:16} {version or 'not installed'}")
    for name, value in machine.items():
        out.print(f"{name:16} {value}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("scheme", "activations", "rows", "kernel", "faster ones not used because"):
        table.add_column(title)
    for entry in kernels:
        reasons = entry["refused"] if every_reason else entry["refused_faster"]
        table.add_row(
            entry["scheme"],
            entry["dtype"],
            str(entry["m"]),
            entry["kernel"] or "none",
            "\n".join(f"{name}: {reason}" for name, reason in reasons.items()),
        )
    out.print(table)


def _packages() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    from quantkit import __version__

    found: dict[str, str | None] = {"quantkit": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _machine() -> dict[str, str]:
    import torch

    facts = {"cpu": f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        reason = "this torch is a CPU build" if built is None else "torch finds no device or driver"
        return facts | {"gpu": f"none: {reason}"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts[f"gpu {index}"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    return facts


def _kernels() -> list[dict[str, Any]]:
    import torch

    from quantkit.kernels.report import choices, device_rows
    from quantkit.packing.schemes import PRESETS, scheme

    device = "cuda" if torch.cuda.is_available() else "cpu"
    order = [row.name for row in device_rows(device)]
    entries = []
    for choice in choices(
        [scheme(name) for name in PRESETS if name != "fp6"],
        (torch.bfloat16, torch.float32),
        (1, 16, 512),
        device=device,
    ):
        position = order.index(choice.row) if choice.row is not None else len(order)
        refused = dict(choice.refusals)
        entries.append(
            {
                "scheme": str(choice.problem.scheme),
                "dtype": str(choice.problem.dtype).removeprefix("torch."),
                "m": choice.problem.m,
                "kernel": choice.row,
                "refused": refused,
                "refused_faster": {n: r for n, r in refused.items() if order.index(n) < position},
            }
        )
    return entries

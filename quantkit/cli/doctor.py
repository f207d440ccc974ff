"""`quantkit doctor`: what runs on this machine, and why the rest does not."""

import platform
from typing import Annotated, Any

import typer
from rich.table import Table

from quantkit.cli import options
from quantkit.cli.console import out, print_json, say

#: Rows of x: decoding, a small batch, a prompt.
ROWS_OF_X = (1, 16, 512)

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "huggingface-hub", "accelerate", "lm-eval")


def doctor(
    reasons: Annotated[
        bool, typer.Option("--reasons", help="Also, for every case, why no other kernel runs.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Show what runs on this machine.

    Versions, the GPU, and which kernel runs per scheme, dtype of the activations and rows of x.
    """
    packages, machine, kernels = _packages(), _machine(), _kernels()
    if json:
        print_json({"packages": packages, "machine": machine, "kernels": kernels})
        return
    for name, version in packages.items():
        say(f"{name:16} {version or 'not installed'}")
    for name, value in machine.items():
        say(f"{name:16} {value}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("scheme", "activations", *(f"M={m}" for m in ROWS_OF_X)):
        table.add_column(title, no_wrap=True)
    for (scheme, dtype), entries in _by_scheme(kernels).items():
        table.add_row(scheme, dtype, *(entry["kernel"] or "none" for entry in entries))
    say("\nkernel that runs y = x W^T for M rows of x (--reasons: why no other)", style="bold")
    out.print(table)
    if reasons:
        for entry in kernels:
            say(f"\n{entry['scheme']}, {entry['dtype']}, M={entry['m']}: {entry['kernel'] or 'none'}")
            for name, reason in entry["refused"].items():
                say(f"  not {name}: {reason}")


def _by_scheme(kernels: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for entry in kernels:
        grouped.setdefault((entry["scheme"], entry["dtype"]), []).append(entry)
    return grouped


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

    from quantkit.kernels.report import choices
    from quantkit.packing.schemes import PRESETS, scheme

    schemes = dict.fromkeys(scheme(name) for name in PRESETS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [
        {
            "scheme": str(choice.problem.scheme),
            "dtype": str(choice.problem.dtype).removeprefix("torch."),
            "m": choice.problem.m,
            "kernel": choice.row,
            "refused": dict(choice.refusals),
        }
        for choice in choices(schemes, (torch.bfloat16, torch.float32), ROWS_OF_X, device=device)
    ]

"""`quantkit doctor`: what runs on this machine, and why the rest does not."""

import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.about import TESTED_TRANSFORMERS
from quantkit.cli import options, parsing
from quantkit.cli.console import note, print_json, print_table, say

if TYPE_CHECKING:
    from quantkit.packing.schemes import Scheme

#: Rows of x: decoding, a small batch, a prompt.
ROWS_OF_X = "1,16,512"
#: [N, K] of the weight that is asked about where no checkpoint is named.
SHAPE = (4096, 4096)

#: What NVIDIA's driver says of itself on Linux.
_DRIVER_FILE = Path("/proc/driver/nvidia/version")

_PACKAGES = ("torch", "triton", "transformers", "safetensors", "huggingface-hub", "accelerate", "lm-eval")


def doctor(
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="[DIR]",
            exists=True,
            file_okay=False,
            readable=False,
            help="A packed checkpoint, whose weights to ask about.",
        ),
    ] = None,
    reasons: Annotated[
        bool, typer.Option("--reasons", help="Also, for every case, why no other kernel runs.")
    ] = False,
    m: options.RowsOfX = ROWS_OF_X,
    json: options.Json = False,
) -> None:
    """Show what runs on this machine.

    Versions, the GPU, its tile tables, and which kernel runs per weight, dtype of the activations and rows of
    x: for every format, or for the weights of DIR.
    """
    from quantkit.kernels.registry import FORCE_VARIABLE, forced_kernel, kernel_named
    from quantkit.kernels.report import experts_text

    rows_of_x = parsing.parse_rows_of_x(m)
    if forced_kernel():
        forced = kernel_named(forced_kernel()).name
        note(
            f"{FORCE_VARIABLE} is set, and products run {forced} or not at all; this is what runs without it"
        )
    packages, machine, tables, slow = _packages(), _machine(), _tile_tables(), _why_slow()
    kernels = _kernels(directory, rows_of_x)
    if json:
        print_json(
            {
                "packages": packages,
                "machine": machine,
                "slow": slow,
                "tile_tables": tables,
                "kernels": kernels,
            }
        )
        return
    for device, reason in slow.items():
        say(f"{device}: packed products run slower than they could: {reason}", style="bold")
    for name, version in packages.items():
        say(f"{name:16} {version or 'not installed'}{_tested(name)}")
    for name, value in machine.items():
        say(f"{name:16} {value}")
    if "gpu 0" in machine:
        say(f"{'float16 sums':16} {_fp16_accumulation()}")
        _say_tables(tables)
    # Every format has the one shape.
    shape = [] if directory is None else ["NxK"]
    headings = ("scheme", *shape, "activations", *(f"M={m}" for m in rows_of_x))
    table = [
        (scheme, *(size for _ in shape), dtype, *(entry["kernel"] or "none" for entry in entries))
        for (scheme, size, dtype), entries in _by_weight(kernels).items()
    ]
    say("\nkernel that runs y = x W^T for M rows of x (--reasons: why no other)", style="bold")
    print_table(headings, table, words=headings)
    if reasons:
        for entry in kernels:
            what = [entry["scheme"], *(entry["shape"] for _ in shape), entry["dtype"], f"M={entry['m']}"]
            measured = "" if entry["us"] is None else f", measured {entry['us']:.1f} us"
            tile = "" if entry["tile"] is None else f" {entry['tile']}"
            say(f"\n{', '.join(what)}: {entry['kernel'] or 'none'}{tile}{measured}")
            for name, reason in entry["refused"].items():
                say(f"  not {name}: {reason}")
            say(f"  experts: {experts_text(entry['experts_ungrouped'], entry['experts_unshared'])}")


def _tested(package: str) -> str:
    """Return the tested versions of a package, in parentheses; empty for all but two."""
    from quantkit.kernels.triton_support import tested_versions

    versions = {
        "triton": tested_versions(),
        "transformers": f"{TESTED_TRANSFORMERS[0]} to {TESTED_TRANSFORMERS[-1]}",
    }
    return f" (tested: {versions[package]})" if package in versions else ""


def _say_tables(tables: list[dict[str, Any]]) -> None:
    for found in tables:
        say(
            f"{'tile table':16} {found['source']}: {found['entries']} entries, made with {found['made_with']}"
        )
    if not tables:
        say(f"{'tile table':16} none for this GPU, rules choose; `quantkit tune` measures")
    elif all(found["source"].startswith("shipped, ") for found in tables):
        say(f"{'':16} of a GPU like this one; `quantkit tune` measures on this one")


def _by_weight(kernels: list[dict[str, Any]]) -> dict[tuple[str, str, str], list[dict[str, Any]]]:
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for entry in kernels:
        grouped.setdefault((entry["scheme"], entry["shape"], entry["dtype"]), []).append(entry)
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
    facts["driver"] = _driver()
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        facts[f"gpu {index}"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
    return facts


def _driver() -> str:
    """Return the version of NVIDIA's kernel driver, if there is one, and what torch is built for."""
    import torch

    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        found = None
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    return f"{found[0] if found else 'of unknown version'}; torch is built for {built}"


def _why_slow() -> dict[str, str]:
    """Why the fastest kernels do not run, for each GPU where they do not."""
    import torch

    from quantkit.kernels.triton_support import why_slow

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = {f"gpu {index}": why_slow(torch.device("cuda", index)) for index in range(count)}
    return {name: reason for name, reason in found.items() if reason is not None}


def _fp16_accumulation() -> str:
    """Whether summing in float16 may pay on the current GPU. The process that runs a model has the switch."""
    import torch

    from quantkit.kernels.gemm.gpu_limits import HALF_RATE
    from quantkit.kernels.problem import gpu_of

    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device()))
    if gpu is None or gpu.capability not in HALF_RATE:
        return "bring nothing on this GPU"
    return (
        "off unless torch.backends.cuda.matmul.allow_fp16_accumulation is set, which may make float16 tiles "
        "faster, and makes them less accurate"
    )


def _tile_tables() -> list[dict[str, Any]]:
    """The tile tables of the current GPU, the one that wins first."""
    import torch

    from quantkit.kernels.problem import gpu_of
    from quantkit.kernels.registry import tile_tables

    gpu = gpu_of(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else None
    if gpu is None:
        return []
    return [
        {
            "source": stored.source,
            "entries": len(stored.table.entries),
            "made_with": ", ".join(f"{name} {version}" for name, version in stored.table.made_with.items()),
        }
        for stored in tile_tables(gpu)
    ]


def _kernels(directory: Path | None, rows_of_x: list[int]) -> list[dict[str, Any]]:
    import torch

    from quantkit.devices import best_device
    from quantkit.kernels.report import selections

    return [
        {
            "scheme": str(selection.problem.scheme),
            "shape": f"{selection.problem.n}x{selection.problem.k}",
            "dtype": str(selection.problem.dtype).removeprefix("torch."),
            "m": selection.problem.m,
            "kernel": selection.kernel,
            "tile": selection.tile,
            "us": selection.us,
            "refused": dict(selection.refusals),
            "experts_ungrouped": selection.ungrouped,
            "experts_unshared": selection.unshared,
        }
        for scheme, shape in _weights(directory)
        for selection in selections(
            [scheme], (torch.bfloat16, torch.float32), rows_of_x, shape=shape, device=best_device().type
        )
    ]


def _weights(directory: Path | None) -> "list[tuple[Scheme, tuple[int, int]]]":
    if directory is not None:
        from quantkit.runtime.weights import packed_weights

        return list(packed_weights(directory))
    from quantkit.packing.presets import PRESETS
    from quantkit.packing.schemes import scheme

    return [(one, SHAPE) for one in dict.fromkeys(scheme(name) for name in PRESETS)]

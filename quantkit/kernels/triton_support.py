"""Detect the installed version of Triton, and whether it compiles the fused kernels.

Gluon, the language of the fastest kernels, is not stable: every version of Triton moves names. So a small
kernel with the same operations is compiled, instead of trusting a version number.
"""

import importlib.util
from functools import lru_cache
from importlib import metadata
from typing import Any

import torch

#: Minor versions of Triton with which `tests/compat/triton.py` compiles every kernel, oldest first. `doctor`,
#: pyproject.toml and the docs agree.
TESTED_TRITON = ("3.6", "3.7", "3.8", "3.9")
#: Least compute capability whose tensor cores multiply bfloat16, as all fused kernels with PTX need.
BFLOAT16_SINCE = (8, 0)
#: Major compute capability with `wgmma`.
WGMMA_MAJOR = 9


def tested_versions() -> str:
    """Return the range of tested versions of Triton as text: `3.6 to 3.9`."""
    return f"{TESTED_TRITON[0]} to {TESTED_TRITON[-1]}"


def triton_version() -> str | None:
    """Return the version of the installed Triton; None without Triton."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        # Builds by AMD or Intel have another distribution name.
        return str(getattr(importlib.import_module("triton"), "__version__", "of unknown version"))


@lru_cache(maxsize=64)
def gluon_failure(device: torch.device) -> str | None:
    """Return why Gluon kernels do not compile for `device`, an NVIDIA GPU; None if they do.

    Takes about 2 s the first time on a machine (H100); then Triton's cache has the kernels.
    """
    try:
        probe: Any = importlib.import_module("quantkit.kernels.gluon.probe")
        kernels = [probe.copy_and_multiply]
        if torch.cuda.get_device_capability(device)[0] == WGMMA_MAJOR:
            kernels.append(probe.specialize)
        with torch.cuda.device(device):
            for kernel in kernels:
                kernel.warmup(torch.int32, torch.float32, grid=(1,), num_warps=4, enable_fp_fusion=True)
    except Exception as error:  # A compiler of an unknown version may raise anything.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
        return f"{type(cause).__name__}: {lines[-1] if lines else 'no text'}"
    return None


def why_slow(device: torch.device) -> str | None:
    """Return why the fastest kernels do not run on `device`, and a remedy; None if they run, or on a CPU.

    The text is one or two sentences, for `doctor` and for messages on loading.
    """
    if device.type != "cuda":
        return None
    version = triton_version()
    if version is None:
        return (
            "Triton is not installed, so every product unpacks its weight first. Install Triton "
            f"{tested_versions()}, which a torch for GPUs brings along."
        )
    if torch.version.hip is not None:
        return (
            "the fastest kernels are for NVIDIA GPUs. Portable kernels run on this one, for which they "
            "compile but were never timed."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < BFLOAT16_SINCE:
        found, least = (".".join(map(str, one)) for one in (capability, BFLOAT16_SINCE))
        return (
            f"the fastest kernels need compute capability {least}, and this GPU has {found}. Portable "
            "kernels run, which were not timed on it."
        )
    failure = gluon_failure(device)
    if failure is None:
        return None
    return (
        f"Triton {version} does not compile the fastest kernels ({failure}), so portable ones run, which "
        f"take up to 4 times as long. Install a torch that brings Triton {tested_versions()}."
    )

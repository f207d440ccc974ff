"""The versions of vLLM that the plug-in fits."""

from importlib.metadata import PackageNotFoundError, version

#: Versions of vLLM whose classes the plug-in was held to, oldest first.
TRIED = ("0.26.0", "0.32.0")


def moved(error: Exception) -> str:
    """Return what to tell a user whose vLLM lacks a class or function that the plug-in needs."""
    return (
        f"quantkit's plug-in was made for vLLM {TRIED[0]} to {TRIED[-1]} and does not fit vLLM "
        f"{_installed()}: {error}. Install one of these versions, or load the model with quantkit.load."
    )


def _installed() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "of an unknown version"

"""Say what to do if vLLM lacks a class of the plug-in. The versions are in `checkpoint/engines.py`."""

from importlib.metadata import PackageNotFoundError, version

from quantkit.checkpoint.engines import VLLM


def moved(error: Exception) -> str:
    """Return what to tell a user whose vLLM lacks a class or function that the plug-in needs."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        found = "of an unknown version"
    return (
        f"quantkit's plug-in was tried with {VLLM.plugin_tried} and does not fit vLLM {found}: {error}. "
        "Install one of these, or load the model with quantkit.load."
    )

"""Say what to do if SGLang lacks a class of the plug-in. The versions are in `checkpoint/engines.py`."""

from importlib.metadata import PackageNotFoundError, version

from quantkit.checkpoint.engines import SGLANG


def moved(error: Exception) -> str:
    """Return what to tell a user whose SGLang lacks a class or function that the plug-in needs."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "of an unknown version"
    return (
        f"quantkit's plug-in was tried with {SGLANG.plugin_tried} and does not fit SGLang {found}: {error}. "
        "Install that version, or load the model with quantkit.load."
    )

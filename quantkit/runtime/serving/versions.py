"""Error text for versions of a serving engine that the plug-in does not fit."""

from importlib.metadata import PackageNotFoundError, version

from quantkit.checkpoint.engines import Engine


def moved(engine: Engine, error: Exception) -> str:
    """Return the error text for an `engine` that lacks what the plug-in needs; `error` says what that is."""
    try:
        found = version(engine.name.lower())
    except PackageNotFoundError:
        found = "of an unknown version"
    return (
        f"quantkit's plug-in was tried with {engine.plugin_tried} and does not fit {engine.name} {found}: "
        f"{error}. Install what it was tried with, or load the model with quantkit.load."
    )

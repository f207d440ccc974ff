"""The transformers versions that quantkit works with."""

import warnings
from importlib import import_module, metadata
from types import ModuleType

from quantkit.errors import EnvironmentProblem

#: Inclusive and exclusive; pyproject.toml says the same.
MINIMUM, BELOW = (5, 12), (6, 0)


def require_transformers() -> None:
    """Raise `EnvironmentProblem` if transformers is missing or outside the supported range."""
    problem = _problem()
    if problem is not None:
        raise EnvironmentProblem(problem)


def register_plugin(module: ModuleType | None = None) -> None:
    """Register the plug-in with transformers; runs when `transformers.quantizers.auto` is imported.

    A version that is not supported is a warning here, as transformers may be imported for other things.
    """
    problem = _problem()
    if problem is not None:
        warnings.warn(f"quantkit's formats are not registered with transformers: {problem}", stacklevel=2)
        return
    import_module("quantkit.model.plugin")


def _problem() -> str | None:
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != "none" and MINIMUM <= _release(found) < BELOW:
        return None
    return (
        f"packed models need transformers >={_text(MINIMUM)},<{_text(BELOW)}; found {found}. "
        f"Install one with `pip install 'transformers>={_text(MINIMUM)},<{_text(BELOW)}'`."
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))

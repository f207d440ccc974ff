"""Supported versions of transformers."""

from importlib import metadata

from quantkit.errors import EnvironmentProblem

#: Inclusive and exclusive bound, as in pyproject.toml.
MINIMUM, BELOW = (5, 12), (6, 0)


def require_transformers() -> None:
    """Raise `EnvironmentProblem` if transformers is missing or outside the supported range."""
    problem = why_unsupported()
    if problem is not None:
        raise EnvironmentProblem(problem)


def why_unsupported() -> str | None:
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = "none"
    if version != "none" and MINIMUM <= _release(version) < BELOW:
        return None
    return (
        f"packed models need transformers >={_text(MINIMUM)},<{_text(BELOW)}; found {version}. "
        f"Install one with `pip install 'transformers>={_text(MINIMUM)},<{_text(BELOW)}'`."
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))

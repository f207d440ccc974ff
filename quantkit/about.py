"""The name and version of this distribution, and how to get it.

The package index has a `quantkit` of another author, so every text that names an installation takes it from
here (`tests/test_about.py`).
"""

import json

#: What pip calls this distribution; pyproject.toml says the same. Import name and command are `quantkit`.
DISTRIBUTION = "quantkit-lowbit"
#: pyproject.toml reads it.
VERSION = "0.1.0"
#: Versions of transformers that `tests/compat/run.py` takes: the oldest supported, that of the GPU test
#: machines, one that vLLM pins, the last that calls a cache `past_key_values`, the latest tested.
TESTED_TRANSFORMERS = ("5.12.1", "5.17.0", "5.19.0", "5.23.0", "5.24.0")
#: What pip installs for each extra that a user may miss; pyproject.toml says the same.
EXTRAS = {
    "eval": "lm-eval[hf]>=0.4.13",
    "plots": "matplotlib>=3.9",
    "parquet": "pyarrow>=17",
    "gguf": "gguf>=0.19",
    "images": "pillow>=11",
}


def pip_install(extra: str) -> str:
    """The command that installs the package behind `extra`.

    It names that package and not ours, so that it works however quantkit was installed.
    """
    return f"`pip install '{EXTRAS[extra]}'`"


def requirement() -> str | None:
    """What another machine can give to pip to get this distribution; None if it came from a local directory.

    That is the URL that this one was installed from, or its name if it was installed from an index.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:  # a source tree on the path
        return None
    # Installers leave their name, builds in a source tree do not.
    if found.read_text("INSTALLER") is None:
        return None
    # Written for all that is not looked up in an index (PEP 610).
    text = found.read_text("direct_url.json")
    if text is None:
        return DISTRIBUTION
    origin = json.loads(text)
    if not origin["url"].startswith("https://"):
        return None
    vcs = origin.get("vcs_info")
    url = origin["url"] if vcs is None else f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    return f"{DISTRIBUTION} @ {url}"

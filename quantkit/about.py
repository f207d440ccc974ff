"""The name and version of this distribution, and how to get it.

The package index has a `quantkit` of another author, so every text that names an installation takes it from
here (`tests/test_about.py`).
"""

import json

#: Name of the distribution on the package index, as in pyproject.toml. Import name and command are
#: `quantkit`.
DISTRIBUTION = "quantkit-lowbit"
#: Version of this package; pyproject.toml reads it from here.
VERSION = "0.1.0"
#: Versions of transformers that `tests/compat/run.py` tests: the oldest supported, the version of the GPU
#: test machines, a version that vLLM pins, the last one that calls a cache `past_key_values`, the newest.
TESTED_TRANSFORMERS = ("5.12.1", "5.17.0", "5.19.0", "5.23.0", "5.24.0")
#: Packages that pip installs for each extra, as in pyproject.toml.
EXTRAS = {
    "eval": "lm-eval[hf]>=0.4.13",
    "plots": "matplotlib>=3.9",
    "parquet": "pyarrow>=17",
    "gguf": "gguf>=0.19",
    "images": "pillow>=11",
    "lora": "peft>=0.19",
}


def pip_install(extra: str) -> str:
    """Return the command that installs the package behind `extra`.

    The command names that package and not ours, so it works however quantkit was installed.
    """
    return f"`pip install '{EXTRAS[extra]}'`"


def requirement() -> str | None:
    """Return a pip requirement for this distribution on other machines; None for a local directory.

    It is the URL of the installation, or the name for an installation from an index.
    """
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        found = distribution(DISTRIBUTION)
    except PackageNotFoundError:  # a source tree on the path
        return None
    # Installers write this file; builds in a source tree do not.
    if found.read_text("INSTALLER") is None:
        return None
    # Written for every installation that does not come from an index (PEP 610).
    text = found.read_text("direct_url.json")
    if text is None:
        return DISTRIBUTION
    origin = json.loads(text)
    if not origin["url"].startswith("https://"):
        return None
    vcs = origin.get("vcs_info")
    url = origin["url"] if vcs is None else f"{vcs['vcs']}+{origin['url']}@{vcs['commit_id']}"
    return f"{DISTRIBUTION} @ {url}"

"""Take fields from the source's card, of which a packed directory has a copy in README.md.

Only that copy is read, neither the hub nor the source: a packed directory may come from anyone, and its
manifest may name any path or repository as source.
"""

import re
from pathlib import Path
from typing import Any

from quantkit.checkpoint.output.atomic_write import read_inside

CARD_NAME = "README.md"
#: Fields that hold for every copy of the weights.
_CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag")
#: Largest card in bytes; the front matter of some has benchmarks of hundreds of kilobytes.
_MAX_CARD_BYTES = 4 << 20
_MAX_ENTRY_CHARS = 4096
_FRONT_MATTER = re.compile(r"\s*---[ \t]*\r?\n(.*?\n)---[ \t]*(?:\r?\n|\Z)", re.DOTALL)


def carried_metadata(directory: Path) -> dict[str, Any]:
    """Return license, language and pipeline from the front matter of README.md in `directory`.

    The values are texts or lists of them. Missing for a file that is absent, unreadable, no YAML, or a link
    out of the directory, as a card is for people only.
    """
    try:
        text = read_inside(directory / CARD_NAME, _MAX_CARD_BYTES)[:_MAX_CARD_BYTES].decode("utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return {}
    front = _FRONT_MATTER.match(text)
    entries = {key: None if front is None else _entry(front[1], key) for key in _CARRIED}
    return {key: value for key, value in entries.items() if value}


def _entry(front: str, key: str) -> str | list[str] | None:
    """Return a top-level value of YAML, a text or a list of texts; None for anything else."""
    import yaml

    # Only this entry is parsed: YAML of a megabyte takes minutes, and aliases may expand to anything.
    found = re.search(rf"^{key}:.*\n(?:[ \t-].*\n|\r?\n)*", front, re.MULTILINE)
    if found is None or len(found[0]) > _MAX_ENTRY_CHARS:
        return None
    try:
        # All scalars as text: in YAML 1.1 the language `no` would be false.
        value = yaml.BaseLoader(found[0]).get_single_data()[key]
    except (yaml.YAMLError, ValueError, RecursionError, KeyError, TypeError):
        return None
    texts = value if isinstance(value, list) else [value]
    usable = all(isinstance(one, str) and one and one.isprintable() for one in texts)
    return value if texts and usable else None

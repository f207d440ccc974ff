"""YAML (1.1, https://yaml.org/spec/1.1) with the values and the strictness of TOML.

Keys are texts and occur once. Values are mappings, lists, texts, numbers and truth values; a number begins
with a 0 only where a base follows, as in 0x80. Null, anchors, aliases and other tags are errors, so a small
file cannot stand for a large value.
"""

import re
from collections.abc import Callable
from typing import Any

import yaml

from quantkit.files import shown

_TAG = "tag:yaml.org,2002:"
_TRUTH = {"yes": True, "no": False, "true": True, "false": False, "on": True, "off": False}

#: What a scalar without quotes may be beside a text: its tag, pattern, first characters, and value.
_PLAIN: tuple[tuple[str, str, str, Callable[[str], Any]], ...] = (
    ("bool", r"(?i:yes|no|true|false|on|off)", "yYnNtTfFoO", lambda text: _TRUTH[text.lower()]),
    (
        "int",  # of YAML 1.1 without 0100 for 64 and 2:08 for 128, which nobody means
        r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)",
        "-+0123456789",
        lambda text: int(text, 0),
    ),
    (
        "float",
        r"[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?",
        "-+0123456789",
        float,
    ),
)
_VALUES: dict[str, Callable[[str], Any]] = {
    f"{_TAG}str": str,
    **{_TAG + tag: value for tag, _, _, value in _PLAIN},
}
_QUOTE = 'If it is a pattern, quote it, as in match: "*.down_proj"'


def parse_yaml(text: str) -> dict[str, Any]:
    """`text` as a mapping, empty if it says nothing; a `ValueError` tells the line and what is wrong there.

    Time and memory are in proportion to the text, but hundreds of its bytes for each: bound its length.
    """
    try:
        node = _tree(text)
        value = {} if node is None or node.value == "" else _value(node)
    except RecursionError:
        raise ValueError("it is nested too deeply; expected a few levels of YAML") from None
    if not isinstance(value, dict):
        raise ValueError(_at(node.start_mark, f"found {shown(value)}; expected lines of 'key: value'"))
    return value


def _tree(text: str) -> Any:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(
            f"line {line}: found the character {chr(error.character)!r}; expected a text file"
        ) from None
    try:
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        raise ValueError(_at(error.problem_mark, f"{problem}. {_QUOTE}")) from None
    except (ValueError, OverflowError) as error:  # PyYAML does not catch those of int and chr
        raise ValueError(_at(loader.get_mark(), f"found no valid YAML: {error}")) from None


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Composes trees: no node has two parents."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 -- filled below

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if event.anchor is not None:
            mark = "*" if isinstance(event, yaml.AliasEvent) else "&"
            problem = f"found {shown(mark + event.anchor)}; expected the value itself, without an alias"
            raise yaml.composer.ComposerError(None, None, problem, event.start_mark)
        return super().compose_node(parent, index)


for _name, _pattern, _first, _ in _PLAIN:
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), list(_first))
_Loader.add_implicit_resolver(f"{_TAG}null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])


def _value(node: Any) -> Any:
    if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
        return _mapping(node)
    if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
        return [_value(item) for item in node.value]
    if node.tag == f"{_TAG}null":
        raise ValueError(_at(node.start_mark, "found no value (null). Give one, or leave out its key"))
    if not isinstance(node, yaml.ScalarNode) or node.tag not in _VALUES:
        tag = shown(node.tag.replace(_TAG, "!!"))
        raise ValueError(_at(node.start_mark, f"found the tag {tag}; expected a value without one. {_QUOTE}"))
    try:
        return _VALUES[node.tag](node.value)
    except (ValueError, KeyError):  # such as !!int x, 1__2, or integers of thousands of digits
        kind = node.tag.removeprefix(_TAG)
        raise ValueError(
            _at(
                node.start_mark,
                f"found {shown(node.value)}; expected a valid {kind}. If it is a text, quote it",
            )
        ) from None


def _mapping(node: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(_at(key.start_mark, f"found a {key.id} as a key; expected a text. {_QUOTE}"))
        if key.value in found:
            raise ValueError(
                _at(
                    key.start_mark,
                    f"key {shown(key.value)} occurs twice in one mapping, first in line {lines[key.value]}; "
                    "expected once. Remove one",
                )
            )
        # Whatever YAML makes of a word such as on: TOML's keys are texts too.
        found[key.value] = _value(value)
        lines[key.value] = key.start_mark.line + 1
    return found


def _at(mark: Any, problem: str) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"

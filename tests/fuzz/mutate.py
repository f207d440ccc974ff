"""Structured mutations: JSON as trees that may say what no writer says, bytes, safetensors, directories.

Every function takes its choices from a `random.Random`, so a case is its seed, and hypothesis can shrink it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


class Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs in order, which may repeat a key."""


@dataclass(frozen=True)
class Raw:
    """JSON text that stands for itself."""

    text: str


Tree = Any

#: Numbers at the edges of what Python, torch, numpy and 64-bit code can count.
NUMBERS: tuple[Tree, ...] = (
    0, -1, 1, 2, 3, 7, 8, 9, 16, 31, 32, 33, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**40,
    2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**30, 0.0, 0.5, -0.5, 1.0, 1e-45,
    1e300, 3.5e38, Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"), Raw("-0"), Raw("-0.0"),
    Raw("1E400"), Raw("9" * 4300), Raw("-" + "9" * 4300), Raw("1" + "0" * 4300), Raw("9" * 310),
)  # fmt: skip
#: Texts that are paths, code, control characters, no characters, long, or words that parsers know.
TEXTS: tuple[Tree, ...] = (
    "", " ", ".", "..", "../outside", "../../../../etc/passwd", "/etc/passwd", "\\\\host\\share", "a/b",
    "C:\\x", "file:///etc/passwd", "https://example.invalid/x", "hf:a/b", "kernels-community/flash-attn2",
    "none", "null", "a\0b", "\0", "\x1b[31mred", "\x07", "a\nb", "a\rb", "\u202etxt", "\ud800", "\udfff",
    "\ufeff", "日本語", "é", "x" * 600, "x" * 70000, "%s%n", "{0.__class__}", "__class__", "__import__('os')",
    "NaN", "1", "-1", "1e9", "tensor", "channel", "float32", "F32", "I64", "BF16", "U8", "F8_E8M0", "F4",
    "int4", "int8", "binary", "ternary",
)  # fmt: skip
OTHERS: tuple[Tree, ...] = (None, True, False, Pairs(), [], [[]], [None], Pairs([("", None)]))


def parse(text: bytes | str) -> Tree:
    """JSON as a tree; `ValueError` or `RecursionError` for what is none."""
    return json.loads(text, object_pairs_hook=Pairs)


def dump(tree: Tree) -> bytes:
    """A tree as JSON, of whatever depth: built without recursion."""
    parts: list[str] = []
    stack: list[Any] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, Raw):
            parts.append(node.text)
        elif isinstance(node, Pairs):
            stack.append(Raw("}"))
            for i, (key, value) in reversed(list(enumerate(node))):
                stack += [value, Raw(f"{',' if i else ''}{json.dumps(key)}:")]
            stack.append(Raw("{"))
        elif isinstance(node, list):
            stack.append(Raw("]"))
            for i, value in reversed(list(enumerate(node))):
                stack.append(value)
                if i:
                    stack.append(Raw(","))
            stack.append(Raw("["))
        else:
            parts.append(json.dumps(node))
    # What is no character on its own cannot be UTF-8: `json.dumps` has written it as an escape.
    return "".join(parts).encode()


def places(tree: Tree) -> list[tuple[Any, int]]:
    """Every value of a tree but its root, as the container it is in and its position there."""
    found: list[tuple[Any, int]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            found += ((node, i) for i in range(len(node)))
            stack += [pair[1] for pair in node] if isinstance(node, Pairs) else node
    return found


def get(place: tuple[Any, int]) -> Tree:
    container, at = place
    return container[at][1] if isinstance(container, Pairs) else container[at]


def put(place: tuple[Any, int], value: Tree) -> None:
    container, at = place
    container[at] = (container[at][0], value) if isinstance(container, Pairs) else value


def atom(random: Random) -> Tree:
    """A value that a careless reader does not expect."""
    kind = random.randrange(8)
    if kind < 4:
        return random.choice(NUMBERS)
    if kind < 6:
        return random.choice(TEXTS)
    if kind < 7:
        return copy(random.choice(OTHERS))
    depth = random.choice((3, 50, 120, 400, 900, 990, 5000, 100_000))
    opening, closing = random.choice((("[", "]"), ('{"a":', "}")))
    return Raw(opening * depth + random.choice(("1", "[]", '"x"')) + closing * depth)


def copy(tree: Tree) -> Tree:
    if isinstance(tree, Pairs):
        return Pairs((key, copy(value)) for key, value in tree)
    return [copy(value) for value in tree] if isinstance(tree, list) else tree


def _replace(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    put(random.choice(found), atom(random))


def _nudge(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    """A number a little off: what is wrong in no obvious way."""
    numbers = [place for place in found if type(get(place)) in (int, float)]
    if numbers:
        place = random.choice(numbers)
        value = get(place)
        ways = (value + 1, value - 1, value * 2, value // 2, -value, value + 32, value % 1000 / 2, str(value))
        put(place, random.choice(ways))


def _drop(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    container, at = random.choice(found)
    del container[at]


def _repeat(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    container, at = random.choice(found)
    container.insert(random.randint(0, len(container)), copy(container[at]))


def _swap(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    """Two values of one kind in each other's place: shapes, dtypes, offsets, schemes."""
    one = random.choice(found)
    kin = [place for place in found if type(get(place)) is type(get(one))]
    other = random.choice(kin)
    first, second = copy(get(one)), copy(get(other))
    put(one, second)
    put(other, first)


def _move(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    put(random.choice(found), copy(get(random.choice(found))))


def _rename(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    objects = [place for place in found if isinstance(place[0], Pairs)]
    if not objects:
        return
    container, at = random.choice(objects)
    names = [place[0][place[1]][0] for place in objects]
    new = random.choice((random.choice(names), random.choice(TEXTS), container[at][0] + "x"))
    container[at] = (new, container[at][1])


#: Keys that mean something to quantkit or to transformers.
_KEYS = (
    "auto_map", "attn_implementation", "_attn_implementation", "_experts_implementation_internal",
    "quantization_config", "text_config", "__metadata__", "model_type", "tie_word_embeddings",
    "num_hidden_layers", "layer_types", "files", "prompt_logits", "quantkit", "modules", "book", "kind",
    "rotate", "default", "why", "__class__", "per_layer_config",
)  # fmt: skip


def _insert(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    objects = [place[0] for place in found if isinstance(place[0], Pairs)]
    if objects:
        value = random.choice((atom(random), copy(get(random.choice(found)))))
        random.choice(objects).append((random.choice(_KEYS), value))


def _reorder(tree: Tree, random: Random, found: list[tuple[Any, int]]) -> None:
    container, _ = random.choice(found)
    random.shuffle(container)


_CHANGES: tuple[Callable[[Tree, Random, list[tuple[Any, int]]], None], ...] = (
    _replace, _replace, _replace, _nudge, _nudge, _nudge, _drop, _repeat, _swap, _swap, _move, _rename,
    _insert, _reorder,
)  # fmt: skip


def mutate_tree(tree: Tree, random: Random) -> Tree:
    """A changed copy of a tree: mostly one change, sometimes several."""
    tree = [copy(tree)]  # so that the root is a place as well
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        found = places(tree)
        if found:
            # Seldom the root: all of its file would be lost.
            random.choice(_CHANGES)(tree, random, found[1:] or found)
    return tree[0] if tree else None


def mutate_json(data: bytes, random: Random) -> bytes:
    """JSON changed in its structure, or in its bytes where that is impossible or now and then."""
    if random.randrange(12) == 0:
        return mutate_bytes(data, random)
    try:
        return dump(mutate_tree(parse(data), random))
    except (ValueError, RecursionError):
        return mutate_bytes(data, random)


#: Bytes that mean something to parsers.
_TOKENS: tuple[bytes, ...] = (
    b"\0", b"\xff", b"\xfe\xff", b"\xef\xbb\xbf", b"\x1f\x8b\x08\x00", b"{", b"}", b"[", b"]", b'"', b",",
    b":", b"\\", b"\n", b"\r\n", b"\xc0\x80", b"\xed\xa0\x80", b"NaN", b"1e999", b"\x00\x00\x80\x7f",
    b"\x00\x00\xc0\x7f", b"&a ", b"*a", b"!!python/object ", b"<<: ", b"- ", b"'''", b'"""', b"[[rule]]\n",
    b"a.b.c.d = ", b"*", b"?[!]",
)  # fmt: skip


def mutate_bytes(data: bytes, random: Random) -> bytes:
    """Bytes flipped, cut, repeated, moved, and mixed with others."""
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        at = random.randint(0, len(found))
        end = min(len(found), at + random.choice((1, 1, 2, 8, 64)))
        kind = random.randrange(9)
        if kind == 0 and at < len(found):
            found[at] ^= 1 << random.randrange(8)
        elif kind == 1 and at < len(found):
            found[at] = random.randrange(256)
        elif kind == 2:
            del found[at:end]
        elif kind == 3:
            del found[at:]
        elif kind == 4:
            found[at:at] = random.choice(_TOKENS)
        elif kind == 5:
            found[at:end] = random.choice(_TOKENS)
        elif kind == 6:
            found[at:at] = found[at:end] * random.choice((1, 2, 100))
        elif kind == 7:
            source = random.randint(0, len(found))
            found[at:end] = found[source : source + (end - at)]
        elif kind == 8 and len(found) >= 8:
            place = random.choice((0, max(0, min(at, len(found) - 8))))
            number = random.choice((0, 1, 7, 8, len(found), 2**25, 2**25 + 1, 2**31, 2**63, 2**64 - 1))
            found[place : place + 8] = number.to_bytes(8, "little")
    return bytes(found)


def mutate_safetensors(data: bytes, random: Random) -> bytes:
    """A safetensors file with another header, another length of it, or other bytes."""
    length = int.from_bytes(data[:8], "little")
    kind = random.randrange(10)
    if kind < 2 or len(data) < 8 + length:
        return mutate_bytes(data, random)
    payload = data[8 + length :]
    if kind == 2:
        return data[: 8 + length] + mutate_bytes(payload, random)
    text = mutate_json(data[8 : 8 + length], random)
    if random.randrange(4) == 0:
        text += b" " * (-len(text) % 8)
    stated = len(text) + (random.choice((-8, -1, 1, 8, 2**40)) if kind == 3 else 0)
    return max(stated, 0).to_bytes(8, "little") + text + payload


#: What a directory may have under a name beside bytes.
@dataclass(frozen=True)
class Link:
    """A symbolic link."""

    target: str


@dataclass(frozen=True)
class Odd:
    """What is no regular file: `fifo` or `folder`."""

    kind: str


Item = bytes | Link | Odd


def pack_directory(items: dict[str, Item]) -> bytes:
    """A directory as one JSON object, which a case is: bytes as Latin-1 text."""
    return dump(Pairs((name, _to_json(item)) for name, item in items.items()))


def _to_json(item: Item) -> Tree:
    if isinstance(item, bytes):
        return item.decode("latin-1")
    return Pairs([("link", item.target)] if isinstance(item, Link) else [("odd", item.kind)])


def unpack_directory(data: bytes) -> dict[str, Item]:
    """The inverse of `pack_directory`."""
    return {name: _from_json(value) for name, value in parse(data)}


def _from_json(value: Tree) -> Item:
    if isinstance(value, str):
        return value.encode("latin-1")
    ((kind, text),) = value
    return Link(text) if kind == "link" else Odd(text)


def mutate_directory(data: bytes, random: Random) -> bytes:
    """A directory with one or two of its files changed, gone, swapped, linked, or no files at all."""
    items = unpack_directory(data)
    for _ in range(random.choice((1, 1, 1, 2))):
        name = random.choice(list(items))
        item, kind = items[name], random.randrange(20)
        if kind == 0:
            items[name] = Odd(random.choice(("fifo", "folder")))
        elif kind == 1:
            items[name] = Link(
                random.choice(("../outside", "/dev/zero", "/proc/self/mem", name, "gone", "/etc/passwd"))
            )
        elif kind == 2 and len(items) > 1:
            del items[name]
        elif kind == 3:
            other = random.choice(list(items))
            items[name], items[other] = items[other], item
        elif kind == 4:
            items[
                random.choice((name.upper(), f"{name}.tmp", ".tmp-x", f"x-{name}", "model-9.safetensors"))
            ] = item
        elif isinstance(item, bytes):
            items[name] = _mutate_file(name, item, random)
    return pack_directory(items)


def _mutate_file(name: str, data: bytes, random: Random) -> bytes:
    if name.endswith(".safetensors"):
        return mutate_safetensors(data, random)
    if name.endswith(".json"):
        return mutate_json(data, random)
    if name.endswith(".jsonl"):
        return mutate_lines(data, random)
    return mutate_bytes(data, random)


def mutate_lines(data: bytes, random: Random) -> bytes:
    """Lines of JSON: one of them changed, moved, repeated or gone, or the bytes of all."""
    lines = data.splitlines(keepends=True)
    if not lines or random.randrange(8) == 0:
        return mutate_bytes(data, random)
    at = random.randrange(len(lines))
    kind = random.randrange(8)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(random.randint(0, len(lines)), lines[at])
    elif kind == 2:
        random.shuffle(lines)
    else:
        lines[at] = mutate_json(lines[at], random) + b"\n"
    return b"".join(lines)

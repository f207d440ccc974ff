"""Rows of calibration files that name images, and the images: headers, sizes, links, other files."""

import io
import json
import struct
import zlib
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from quantkit.calibrate.data.pictures import MAX_IMAGES, MAX_ROW_PIXELS, pixels_of, read_pictured

from .files import write_items
from .mutate import Item, Link, Odd, mutate_bytes, mutate_lines, pack_directory, unpack_directory

_ROWS = "rows.jsonl"
_NAMES = ("a.png", "b.jpg", "c.webp")
#: What a row may call an image.
_HOSTILE = (
    *(
        "../outside",
        "/etc/passwd",
        "./a.png",
        "a.png/",
        ".",
        "",
        "http://a/b.png",
        "file:a.png",
        "a\0.png",
        "\x1b[31m.png",
    ),
    *(
        "\ud800.png",
        "x" * 300,
        "a.png/../a.png",
        "\\\\host\\a.png",
        "~/a.png",
        "A.PNG",
        None,
        5,
        {},
        ["a.png"],
    ),
    {"path": "a.png"},
)
_NUMBERS = (0, 1, 2, 255, 2**15, 2**16 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1)
#: Beyond which the pixels of a case are not read.
_READ = 1 << 16


@cache
def pictures() -> tuple[bytes, ...]:
    files: dict[str, Item] = {}
    for name, mode in zip(_NAMES, ("RGBA", "RGB", "RGB"), strict=True):
        image = Image.linear_gradient("L").resize((9, 7)).convert(mode)
        kept = io.BytesIO()
        kind = {"jpg": "JPEG"}.get(name[2:], name[2:].upper())
        image.save(kept, kind, **({"progressive": True} if kind == "JPEG" else {}))
        files[name] = kept.getvalue()
    image_part = {"type": "image", "path": "b.jpg"}
    rows: list[Any] = [
        {"images": ["a.png", "b.jpg"], "text": "two"},
        {"image": "c.webp"},
        {"messages": [{"role": "user", "content": [image_part, {"type": "text", "text": "what?"}]}]},
        {"images": ["a.png"], "messages": [{"role": "user", "content": "hi"}]},
        {"text": "no image"},
    ]
    files[_ROWS] = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    return (pack_directory(files),)


def mutate_pictures(case: bytes, random: Random) -> bytes:
    items = unpack_directory(case)
    for _ in range(random.choice((1, 1, 2))):
        name = random.choice((*_NAMES, _ROWS, _ROWS))
        item, kind = items[name], random.randrange(8)
        if not isinstance(item, bytes):
            continue
        if name == _ROWS:
            items[name] = _rows(item, random) if kind < 4 else mutate_lines(item, random)
        elif kind == 0:
            items[name] = Odd(random.choice(("fifo", "folder")))
        elif kind == 1:
            items[name] = Link(
                random.choice(("../outside", "/dev/zero", "/proc/self/mem", name, "gone", "b.jpg"))
            )
        elif kind == 2:
            items[name] = items[random.choice(_NAMES)]
        elif kind < 6:
            items[name] = _header(item, random)
        else:
            items[name] = mutate_bytes(item, random)
    return pack_directory(items)


def _rows(data: bytes, random: Random) -> bytes:
    """One row with other names or no messages."""
    rows = data.split(b"\n")
    row: dict[str, Any] = {"images": random.choice((_HOSTILE, _NAMES, ("a.png",) * (MAX_IMAGES + 1)))}
    row["images"] = [random.choice(row["images"]) for _ in range(random.choice((0, 1, 1, 2, 65)))]
    if random.randrange(2):
        row = {"image": random.choice(_HOSTILE)}
    content = random.choice(
        ("text", [], [{"type": "image"}], [{"type": "image", "url": random.choice(_HOSTILE)}], None)
    )
    chat = random.choice(([], [{"role": "user", "content": content}], [{"role": 5}], "x", {}, [content]))
    rows[random.randrange(len(rows))] = json.dumps(
        {**row, "messages": chat} if random.randrange(3) else row
    ).encode()
    return b"\n".join(rows)


def _header(data: bytes, random: Random) -> bytes:
    """Numbers of the first bytes changed where they stand, with the checksum of a PNG's header made right."""
    if len(data) < 8:
        return mutate_bytes(data, random)
    found = bytearray(data)
    size, form = random.choice(((1, "B"), (2, ">H"), (2, "<H"), (4, ">I"), (4, "<I")))
    at = random.randrange(2, min(len(found), 200) - 4)
    found[at : at + size] = struct.pack(form, random.choice(_NUMBERS) % 256**size)
    if found.startswith(b"\x89PNG"):
        if random.randrange(2):
            found[16:24] = struct.pack(">II", random.choice(_NUMBERS), random.choice(_NUMBERS))
        found[29:33] = struct.pack(">I", zlib.crc32(found[12:29]))
    return bytes(found)


def check_pictures(case: bytes, directory: Path) -> None:
    """Images are in the folder, as many as there are places, and as large as Pillow says."""
    write_items(directory, unpack_directory(case))
    if not (directory / _ROWS).is_file():
        return
    for row in read_pictured(directory / _ROWS):
        places = [part for message in row.messages for part in message["content"] if part["type"] == "image"]
        assert 0 < len(places) == len(row.images) <= MAX_IMAGES
        total = 0
        for path in row.images:
            assert path.resolve().parent == directory.resolve() and path.is_file()
            with Image.open(path) as image:
                total += image.width * image.height
                small = image.width * image.height <= _READ
            if small:
                assert pixels_of(path).mode == "RGB"
        assert total <= MAX_ROW_PIXELS

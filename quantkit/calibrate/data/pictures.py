"""Read images named in rows of `.jsonl` calibration files. The image files are untrusted.

A row names them as `"images": [NAME, ...]`, or in parts of its messages: `{"type": "image", "path": NAME}`.
Names are relative to the folder of the `.jsonl` file.
"""

import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from quantkit.about import pip_install
from quantkit.calibrate.data.documents import MAX_OBJECTS, MAX_VALUES, kind_of, parsed_row, read_lines
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.files import open_regular, shown

#: Largest image file in bytes, and in pixels: a small file may expand to gigabytes.
MAX_BYTES, MAX_PIXELS = 64 << 20, 1 << 26
#: Most pixels of the images of a row, and of all rows, plus an allowance per byte of an image file. Without
#: a limit, files with far more pixels than bytes, or named repeatedly, would take hours.
MAX_ROW_PIXELS, MAX_ALL_PIXELS, MAX_GROWTH = 1 << 27, 1 << 28, 64
#: Most scans of a progressive JPEG: a few bytes make a scan over all pixels. Usual are about ten.
MAX_SCANS = 64
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
#: Accepted formats by Pillow's names. Each decoder is an attack surface.
FORMATS = ("JPEG", "PNG", "WEBP")
#: Most rows of a file, and images of a row.
MAX_ROWS, MAX_IMAGES = 4096, 64
#: Keys that may name a file in a part of a message.
_NAMES = ("path", "image", "url")


@dataclass(frozen=True)
class Pictured:
    """Chat with parts `{"type": "image"}` that refer to `images`, in order."""

    messages: list[dict[str, Any]]
    images: tuple[Path, ...]


def read_pictured(path: Path) -> list[Pictured]:
    """Read the rows of a `.jsonl` file that name images; return none for any other file.

    Raises `UsageError` with the line for a row that is no chat or text with images. Also raised for an image
    that is missing, outside the folder, too large or of another format. Pixels are not read.
    """
    if kind_of(path.name) != ".jsonl":
        return []
    found = []
    for number, line in read_lines(path):
        if not ("image" in line and line.strip()):
            continue
        where = f"{path}: line {number}"
        row = parsed_row(line, where, "one object a line", MAX_OBJECTS, MAX_VALUES)
        pictured = _pictured(row, path.parent, where) if isinstance(row, Mapping) else None
        if pictured is not None:
            found.append(pictured)
        if len(found) == MAX_ROWS:
            break
    _check_pixels(path, found)
    return found


def _check_pixels(path: Path, rows: Sequence[Pictured]) -> None:
    """Open each image; raise `UsageError` if a row, or all rows together, have too many pixels."""
    pixels, left = dict[Path, int](), MAX_ALL_PIXELS
    for image in dict.fromkeys(image for row in rows for image in row.images):
        with closing(open_image(image)) as opened:
            pixels[image] = opened.width * opened.height
        left += MAX_GROWTH * image.stat().st_size
    for row in rows:
        count = sum(pixels[image] for image in row.images)
        left -= count
        if count > MAX_ROW_PIXELS or left < 0:
            raise UsageError(
                f"{path}: the row with {row.images[0].name} has images of {count} pixels; expected at most "
                f"{MAX_ROW_PIXELS} in a row, and in all rows {MAX_ALL_PIXELS} and {MAX_GROWTH} for each byte "
                "of a file. Scale the images down, or leave rows out."
            )


def open_image(path: Path) -> Any:
    """Open the image in `path` with Pillow, without its pixels.

    Raises `UsageError` if it cannot be used, `EnvironmentProblem` without Pillow.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            f"{path}: reading images takes Pillow, which cannot be imported ({error}). Install it with "
            f"{pip_install('images')}."
        ) from error
    try:
        file = open_regular(path)
    except OSError as error:
        raise UsageError(f"image {path} cannot be read ({error.strerror}). Check its name.") from error
    try:
        size = path.stat().st_size
        if size <= MAX_BYTES and _scans(file) > MAX_SCANS:
            raise ValueError(f"more than {MAX_SCANS} scans")
        with warnings.catch_warnings():
            # Pillow warns about some sizes; images that are too large are refused below.
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(file, formats=FORMATS) if size <= MAX_BYTES else None
        pixels = 0 if image is None else image.width * image.height
    except Exception as error:  # Decoders may raise anything.
        file.close()
        raise UsageError(
            f"image {path} is not a readable {', '.join(FORMATS[:-1])} or {FORMATS[-1]} file "
            f"({type(error).__name__}: {shown(str(error)[:100])}). Convert it, or leave its row out."
        ) from error
    if image is None or pixels > MAX_PIXELS:
        file.close()
        has = f"{size} bytes" if image is None else f"{pixels} pixels"
        raise UsageError(
            f"image {path} has {has}; expected at most {MAX_BYTES} bytes and {MAX_PIXELS} pixels. Scale it "
            "down."
        )
    return image


def _scans(file: BinaryIO) -> int:
    """Count the scans of a JPEG; 0 for other formats."""
    data = file.read(MAX_BYTES)
    file.seek(0)
    return data.count(_SCAN) if data.startswith(_JPEG) else 0


def pixels_of(path: Path) -> Any:
    """Read the image in `path` as RGB.

    Raises `UsageError` if it cannot be used, `EnvironmentProblem` without Pillow.
    """
    with closing(open_image(path)) as image:
        try:
            return image.convert("RGB")
        except Exception as error:
            raise UsageError(
                f"image {path} cannot be decoded ({type(error).__name__}). Replace it."
            ) from error


def _pictured(row: Mapping[str, Any], folder: Path, where: str) -> Pictured | None:
    column = row.get("images", row.get("image"))
    named = [column] if isinstance(column, str) else column if isinstance(column, list) else []
    chat = row.get("messages")
    if not isinstance(chat, list):
        text = row.get("text")
        chat = [{"role": "user", "content": text if isinstance(text, str) else ""}]
    messages, inside = [], list[Any]()
    for message in chat:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"{where} has {shown(message)} among its messages; expected role and content.")
        parts = list(_parts(message.get("content"), inside))
        messages.append({"role": message["role"], "content": parts})
    places = sum(part["type"] == "image" for message in messages for part in message["content"])
    names = inside or named
    if not names and not places:
        return None
    if not messages:
        raise UsageError(f"{where} names images and has no messages; expected a place for each. Write one.")
    if not places:
        messages[0]["content"][:0] = [{"type": "image"} for _ in names]
        places = len(names)
    if len(names) != places or places > MAX_IMAGES:
        raise UsageError(
            f"{where} names {len(names)} images and has {places} places for one; expected as many, and at "
            f"most {MAX_IMAGES}."
        )
    return Pictured(messages, tuple(_inside(folder, name, where) for name in names))


def _parts(content: Any, names: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message; append the names of its images to `names`."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type") == "image":
            names += [part[key] for key in _NAMES if part.get(key) is not None][:1]
            yield {"type": "image"}
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield {"type": "text", "text": part["text"]}


def _inside(folder: Path, name: Any, where: str) -> Path:
    """Return the path of file `name` in `folder`; refuse files elsewhere."""
    relative = PurePosixPath(name) if isinstance(name, str) and "\0" not in name else None
    if relative is None or relative.is_absolute() or ".." in relative.parts or "://" in str(name):
        raise UsageError(
            f"{where} has the image {shown(name)}; expected the name of a file in the folder of the .jsonl "
            "file. Copy it there."
        )
    path = folder / relative
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
        real = path.resolve(strict=True)
    except (OSError, ValueError) as error:  # An unpaired surrogate, which no name has.
        why = getattr(error, "strerror", None) or type(error).__name__
        raise UsageError(
            f"{where}: image {shown(name)} is not there ({why}). Check its name, in the folder of the .jsonl "
            "file."
        ) from error
    if not regular or not real.is_relative_to(folder.resolve()):
        raise UsageError(f"{where}: image {shown(name)} is no file in {folder}. Copy it there.")
    return path

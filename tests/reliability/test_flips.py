"""`quantkit verify` notices any one changed byte in any file of a packed directory."""

import random
import shutil
from pathlib import Path

import pytest

from quantkit.checkpoint.manifest import MANIFEST_NAME
from quantkit.errors import QuantkitError
from quantkit.publish.upload import prepare
from quantkit.verification.verify import verify

from .scenarios import command
from .sweep import tell

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"
#: Files up to this size are tried byte by byte, of larger ones the header, the end and a sample.
SMALL = 10_000
SAMPLE = 5
#: The test of every byte is cut into so many, for as many processes.
PARTS = 12


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of every kind of file: two shards, index, config, side files and a manifest with logits."""
    directory = tmp_path_factory.mktemp("flips") / "packed"
    command("quantize", SOURCE, directory, "--method", "rtn", "--format", "int3", "--max-shard-size", "150KB")
    return directory


def positions(data: bytes, every: bool, chance: random.Random) -> list[int]:
    """Which bytes to change: all of a small file, else the ends, some of the header and some of the rest."""
    if every and len(data) <= SMALL:
        return list(range(len(data)))
    header = min(len(data), 8 + int.from_bytes(data[:8], "little") if data[8:9] == b"{" else 64)
    # The padding of a header is its last bytes.
    chosen = {0, 7, 8, header - 1, header % len(data), len(data) - 1}
    chosen |= {chance.randrange(header) for _ in range(SAMPLE)} | {
        chance.randrange(len(data)) for _ in range(SAMPLE)
    }
    return sorted(chosen)


def problems(directory: Path) -> str:
    try:
        return " ".join(text for check in verify(directory, reload=False) for text in check.problems)
    except QuantkitError as error:
        return str(error)


def flip(packed: Path, tmp_path: Path, every: bool, part: slice = slice(None)) -> int:
    """Change bytes of all files, one at a time; how many were tried. `part` is of those of each file."""
    directory = tmp_path / "flipped"
    shutil.copytree(packed, directory)
    assert problems(directory) == ""
    chance, tried = random.Random(0), 0
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        for position in positions(data, every, chance)[part]:
            changed = bytearray(data)
            changed[position] ^= 1 << chance.randrange(8) if every else chance.randrange(1, 256)
            path.write_bytes(changed)
            found = problems(directory)
            assert path.name in found, f"byte {position} of {path.name}: {found or 'nothing is wrong'}"
            tried += 1
        path.write_bytes(data)
    assert problems(directory) == ""
    return tried


def test_some_changed_bytes_of_every_file_are_noticed(packed: Path, tmp_path: Path) -> None:
    assert flip(packed, tmp_path, every=False) > 100


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_changed_byte_of_small_files_is_noticed(packed: Path, tmp_path: Path, part: int) -> None:
    tried = flip(packed, tmp_path, every=True, part=slice(part, None, PARTS))
    tell("changed bytes", tried=tried)
    assert tried > 15_000 // PARTS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"manifest_sha256", b"manifest_sha257"),
        (b'"files": {', b'"files" :{'),
        (b"\n}\n", b"\n}\n\n"),
        (b"\n}\n", b"\n} "),
        (b'"bits_per_weight"', b'"bits_per_weighs"'),
    ],
)
def test_a_manifest_that_says_the_same_or_nothing_of_its_hash_is_noticed(
    packed: Path, tmp_path: Path, old: bytes, new: bytes
) -> None:
    directory = tmp_path / "changed"
    shutil.copytree(packed, directory)
    data = (directory / MANIFEST_NAME).read_bytes()
    assert old in data
    (directory / MANIFEST_NAME).write_bytes(data.replace(old, new, 1))
    assert MANIFEST_NAME in problems(directory)
    with pytest.raises(QuantkitError, match=MANIFEST_NAME):
        prepare(directory, {})


def test_what_the_manifest_does_not_list_is_said_to_be_unchecked(packed: Path, tmp_path: Path) -> None:
    directory = tmp_path / "more"
    shutil.copytree(packed, directory)
    (directory / "notes.md").write_text("mine")
    files, *_ = verify(directory, reload=False)
    assert files.detail.endswith("not in it, and not compared: notes.md") and not files.problems
    (directory / "model.safetensors.index.json.bak").touch()
    (directory / "other.safetensors").touch()
    files, *_ = verify(directory, reload=False)
    assert files.problems == ("other.safetensors is not in the manifest",)

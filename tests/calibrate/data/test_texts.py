"""Sources of calibration texts: which are meant, what each gives, and the text that comes with quantkit."""

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from quantkit.calibrate.data.datasets import DataSetName
from quantkit.calibrate.data.texts import BUNDLED, BUNDLED_NAME, Source, parse_sources, read_source, shares
from quantkit.errors import UsageError

ROOT = Path(__file__).parents[3]
HELD_OUT = ROOT.parent / "shared" / "data" / "eval"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        "a.jsonl",
        "b.txt",
        "c:7.txt",
        "d.txt.gz",
        "hf:owner.txt",
        "b.csv",
        "e,f.txt",
        "b.txt,g,.txt",
    ):
        Path(name).write_text("x")
    Path("folder.txt").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b.txt", [("b.txt", None)]),
        ("b.txt:12", [("b.txt", 12)]),
        ("a.jsonl:256, b.txt:128", [("a.jsonl", 256), ("b.txt", 128)]),
        ("a.jsonl,b.txt", [("a.jsonl", None), ("b.txt", None)]),
        ("c:7.txt:3", [("c:7.txt", 3)]),
        ("c:7.txt", [("c:7.txt", None)]),
        ("d.txt.gz", [("d.txt.gz", None)]),
        ("hf:owner.txt:3", [("hf:owner.txt", 3)]),  # a file that is there
        ("e,f.txt", [("e,f.txt", None)]),
        ("a.jsonl:9,e,f.txt:3,b.txt:2", [("a.jsonl", 9), ("e,f.txt", 3), ("b.txt", 2)]),
        ("b.txt,g,.txt,b.txt", [("b.txt,g,.txt", None), ("b.txt", None)]),
    ],
)
def test_a_source_may_be_a_file_with_a_share(
    files: Path, text: str, expected: list[tuple[str, int | None]]
) -> None:
    assert parse_sources(text) == tuple(Source(Path(name), share) for name, share in expected)


@pytest.mark.parametrize(
    ("text", "repo", "part", "revision", "share"),
    [
        ("hf:a/b", "a/b", None, None, None),
        ("hf:a/b:64", "a/b", None, None, 64),
        ("hf:a-1/b.c/en", "a-1/b.c", "en", None, None),
        ("hf:a/b/en/x-00001-of-2.json.gz:7", "a/b", "en/x-00001-of-2.json.gz", None, 7),
        ("hf:a/b@v1:7", "a/b", None, "v1", 7),
        ("hf:a/b/en@refs/convert/parquet", "a/b", "en", "refs/convert/parquet", None),
    ],
)
def test_a_source_may_be_a_data_set_with_part_revision_and_share(
    files: Path, text: str, repo: str, part: str | None, revision: str | None, share: int | None
) -> None:
    name = DataSetName(repo, part, revision)
    assert parse_sources(text) == (Source(name, share),)
    assert str(name) == (text if share is None else text.rpartition(":")[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no file"),
        ("a.jsonl,,b.txt", "names no file"),
        ("missing.txt", "missing.txt is not there"),
        (f"b.txt,{'x' * 999}.txt", "x.txt cannot be read"),
        (",".join(f"{i}.txt" for i in range(99)), "file 0.txt is not there"),
        ("wikitext", "data set of the hub as hf:Salesforce/wikitext/wikitext-2-raw-v1."),
        ("wikipedia", ".json or .parquet file. Give one, or a data set of the hub as hf:OWNER/NAME."),
        ("user/set:64", "'user/set' is not"),
        ("b.csv", "'b.csv' is not a .txt, "),
        ("folder.txt", "'folder.txt' is not a .txt, "),
        ("hf:wikitext", "'hf:wikitext' names no data set; expected hf:OWNER/NAME, then /CONFIG"),
        ("hf:a/../b", "names no data set"),
        ("hf:a/b@", "names no data set"),
        ("hf:a/b,hf:a/b", "hf:a/b twice"),
        ("b.txt:0", "asks for 0 samples"),
        ("b.txt:99999999999", "asks for 99999999999 samples"),
        ("a.jsonl:3,b.txt", "some of its sources only"),
        ("b.txt,b.txt", "b.txt twice"),
    ],
)
def test_sources_that_are_refused(files: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace(".", r"\.")):
        parse_sources(text)


@pytest.mark.parametrize(
    ("given", "samples", "expected"),
    [
        ((None,), None, (128,)),
        ((None,), 7, (7,)),
        ((256, 128), None, (256, 128)),
        ((256, 128), 9, (6, 3)),
        ((2, 1), 10, (7, 3)),
        ((None, None, None), 128, (43, 43, 42)),
        ((1000, 1), 10, (9, 1)),
        ((1000, 1, 1), 3, (1, 1, 1)),
    ],
)
def test_samples_are_divided_by_the_shares(
    given: tuple[int | None, ...], samples: int | None, expected: tuple[int, ...]
) -> None:
    sources = [Source(Path(f"{i}.txt"), share) for i, share in enumerate(given)]
    assert shares(sources, samples, 128) == expected


def test_fewer_samples_than_files_are_refused() -> None:
    with pytest.raises(UsageError, match="1 calibration samples are fewer than the 2 sources"):
        shares([Source(Path("a.txt")), Source(Path("b.txt"))], 1, 128)


def test_without_a_source_the_bundled_text_is_read_and_said() -> None:
    (source,) = parse_sources(None)
    texts = read_source(source, 1)
    assert texts.name == BUNDLED_NAME == "the text that comes with quantkit"
    assert texts.notes == (
        "calibrated on the text that comes with quantkit; give --calibration for text like yours",
    )
    assert len(texts.documents) == 99
    assert sum(len(text) for text in texts.documents) > 450_000  # 128 samples of 512 tokens, and more


def test_the_bundled_text_is_explained_and_packed_the_same_again() -> None:
    pack = calibration_text().pack
    data = gzip.decompress(BUNDLED.read_bytes())
    assert gzip.decompress(pack(data)) == data
    unknown = json.dumps({"title": "Nobody, Nothing (1999)", "text": "a"}).encode()
    with pytest.raises(SystemExit, match="Nobody, Nothing"):
        pack(unknown)
    text = data.decode().lower()
    assert "gutenberg" not in text and "@gmail" not in text


def test_shared_runs_of_words_are_found(tmp_path: Path) -> None:
    words = [f"w{i}" for i in range(30)]
    rows = [{"title": "own", "text": " ".join(words)}]
    held = tmp_path / "held.txt"
    shared = calibration_text().shared
    held.write_text("other " + ", ".join(words[5:16]).upper() + " end")
    assert shared(rows, [held]) == []  # eleven
    held.write_text("other " + ", ".join(words[5:17]).upper() + " end")
    assert shared(rows, [held]) == [f"own and held.txt: {' '.join(words[5:17])}"]
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"question": " ".join(words[:6]), "choices": [" ".join(words[6:12])]}))
    assert len(shared(rows, [tasks])) == 1


@pytest.mark.skipif(not HELD_OUT.is_dir(), reason="the texts for evaluation are not here")
def test_the_bundled_text_shares_nothing_with_texts_for_evaluation() -> None:
    tool = calibration_text()
    paths = [path for path in HELD_OUT.iterdir() if path.suffix in (".txt", ".jsonl")]
    assert paths and tool.shared(tool.documents(gzip.decompress(BUNDLED.read_bytes())), paths) == []


def calibration_text():
    spec = importlib.util.spec_from_file_location("calibration_text", ROOT / "benchmarks/calibration_text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

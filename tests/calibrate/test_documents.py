"""Calibration texts: what is read, and what is refused with the file and line."""

import builtins
import json
from pathlib import Path

import pytest

from quantkit.calibrate.documents import Source, parse_sources, read_documents, shares
from quantkit.errors import EnvironmentProblem, UsageError


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.jsonl", "b.txt", "c:7.txt"):
        Path(name).write_text("x")
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
    ],
)
def test_sources(files: Path, text: str, expected: list[tuple[str, int | None]]) -> None:
    assert parse_sources(text) == tuple(Source(Path(name), share) for name, share in expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no file"),
        ("a.jsonl,,b.txt", "names no file"),
        ("missing.txt", "missing.txt is not there"),
        ("wikitext", "'wikitext' is not a .txt, .jsonl or .parquet file. Data sets of the hub are not read"),
        ("user/set:64", "'user/set' is not"),
        ("b.txt:0", "asks for 0 samples"),
        ("b.txt:99999999999", "asks for 99999999999 samples"),
        ("a.jsonl:3,b.txt", "some of its files only"),
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
def test_shares(given: tuple[int | None, ...], samples: int | None, expected: tuple[int, ...]) -> None:
    sources = [Source(Path(f"{i}.txt"), share) for i, share in enumerate(given)]
    assert shares(sources, samples, 128) == expected


def test_fewer_samples_than_files_are_refused() -> None:
    with pytest.raises(UsageError, match="1 calibration samples are fewer than the 2 files"):
        shares([Source(Path("a.txt")), Source(Path("b.txt"))], 1, 128)


def test_documents_of_each_kind(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert read_documents(text) == ["one\r\ntwo"]
    lines = tmp_path / "a.jsonl"
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    rows = [{"text": "a\u2028b", "id": 3}, {"text": "  "}, {"messages": chat}]
    lines.write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8"
    )
    assert read_documents(lines) == ["a\u2028b", chat]


def test_parquet_needs_pyarrow_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    plain = builtins.__import__

    def without(name: str, *rest: object, **named: object) -> object:
        if name.startswith("pyarrow"):
            raise ImportError("No module named 'pyarrow'")
        return plain(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentProblem, match=r"a\.parquet.*pip install pyarrow.*jsonl"):
        read_documents(path)


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "id": [1, 2]}), path)
    assert read_documents(path) == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "has no text"),
        ("a.txt", b" \n\t", "has no text"),
        ("a.txt", b"fine\nnot \xff fine", "line 2 is not UTF-8"),
        ("a.txt", b"fine\n\x00", "line 2 has a NUL byte; this is a binary file"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "  "}\n', "has no text"),
        ("a.jsonl", b"[1, 2]", "line 1 has list"),
        ("a.jsonl", b'{"prompt": "a", "answer": "b"}', "line 1 has the keys ['answer', 'prompt']"),
        ("a.jsonl", b'{"text": 3}', "line 1 has the keys ['text']"),
        ("a.jsonl", b'{"messages": []}', "line 1 has the keys"),
        ("a.jsonl", b'{"messages": [{"from": "human"}]}', "line 1 has the keys"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        read_documents(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(UsageError, match="cannot be read"):
        read_documents(tmp_path / "a.txt")

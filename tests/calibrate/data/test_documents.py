"""Calibration texts: what is read, and what is refused with the file and line."""

import builtins
import gzip
import json
import sys
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.calibrate.data import documents
from quantkit.calibrate.data.documents import first_documents, kind_of, read_documents, read_text
from quantkit.calibrate.data.texts import Source, read_source
from quantkit.errors import EnvironmentProblem, UsageError


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
    with pytest.raises(EnvironmentProblem, match=r"a\.parquet.*pip install 'pyarrow>=17'.*jsonl"):
        read_documents(path)


def test_parquet_that_grows_is_read_row_by_row_and_never_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a" * 1_000_000] * 50}), path, compression="gzip")
    assert path.stat().st_size < 10_000
    before = pyarrow.total_allocated_bytes()
    held = max(pyarrow.total_allocated_bytes() - before for _ in documents._parquet(path))
    assert held < 10_000_000
    monkeypatch.setattr(documents, "MAX_DECOMPRESSED_BYTES", 5_000_000)
    assert (
        first_documents(path, sys.maxsize, 4_000_000)[0] == ["a" * 1_000_000] * 4
    )  # the rest is not looked at
    with pytest.raises(
        UsageError, match=r"a\.parquet: has more than 5000000 bytes when decompressed. Give a"
    ):
        read_documents(path)


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"], "id": [1, 2, 3]}), path)
    assert read_documents(path) == ["one", "two"]
    assert first_documents(path, sys.maxsize, 2)[0] == ["one"]
    chats = [[{"role": "user", "content": "hi", "name": None}], [{"role": "user", "content": "ho"}]]
    parquet.write_table(pyarrow.table({"messages": chats, "score": [0.1, 0.2]}), path)
    assert read_documents(path) == [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "ho"}]]
    parquet.write_table(pyarrow.table({"label": [1], "sentence": ["one"]}), path)
    with pytest.raises(
        UsageError, match=r"a\.parquet has the columns \['label', 'sentence'\]; expected text, "
    ):
        read_documents(path)
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UsageError, match=r"a\.parquet: is not a readable parquet file"):
        read_documents(path)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a", "messages": CHAT}, "a"),
        ({"text": None, "messages": CHAT}, CHAT),
        ({"content": "a", "url": "b"}, "a"),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}, CHAT),
        ({"conversations": CHAT}, CHAT),
        ({"messages": [{**CHAT[0], "tool_calls": None}, CHAT[1]]}, CHAT),
        ({"prompt": "1 + 1 =", "completion": " 2"}, "1 + 1 = 2"),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, CHAT),
        ({"prompt": "hi", "response": "ho"}, "hi\nho"),
        ({"instruction": "Add.", "input": "1 1", "output": "2"}, "Add.\n1 1\n2"),
        ({"instruction": "Add.", "input": "", "output": "2"}, "Add.\n2"),
        ({"instruction": "Add.", "output": "2"}, "Add.\n2"),
        ({"question": "Who?", "answer": "I."}, "Who?\nI."),
    ],
)
def test_columns_that_make_a_document(tmp_path: Path, row: object, expected: object) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    assert read_documents(path) == [expected]


def test_nulls_and_empty_texts_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n{"text": ""}\n{"text": "a"}\n{"question": null, "answer": null}')
    assert read_documents(path) == ["a"]


def test_json_files_are_arrays_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    for text in ('\n [{"text": "a"},\n {"text": "b"}]\n', '{"text": "a"}\n{"text": "b"}\n'):
        path.write_text(text)
        assert read_documents(path) == ["a", "b"]


def test_compressed_files_are_read_and_never_grow_without_bound(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    assert read_documents(path) == ["one", "two"]
    monkeypatch.setattr(documents, "MAX_DECOMPRESSED_BYTES", 20)
    assert first_documents(path, sys.maxsize, 3)[0] == ["one"]  # the rest is not looked at
    with pytest.raises(UsageError, match="has more than 20 bytes when decompressed"):
        read_documents(path)
    text = tmp_path / "a.txt.gz"
    text.write_bytes(gzip.compress(b"a" * 20, mtime=0))
    assert read_text(text) == "a" * 20
    text.write_bytes(gzip.compress(b"a" * 21, mtime=0))
    with pytest.raises(UsageError, match="has more than 20 bytes"):
        read_text(text)


def test_a_text_of_short_lines_takes_little_more_memory_than_its_text(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"ab\n" * 500_000))
    tracemalloc.start()
    text = read_text(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert text == "ab\n" * 500_000
    assert peak < 10 * len(text)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("a.txt", ".txt"), ("a.b.jsonl", ".jsonl"), ("x/a.json.gz", ".json"), ("a.parquet", ".parquet")),
        *(("a.parquet.gz", None), ("a.gz", None), ("jsonl", None), ("a.csv", None), ("a.txt.zip", None)),
    ],
)
def test_the_kind_of_a_file_is_read_from_its_name(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


@pytest.mark.fault(50)
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
        ("a.jsonl", b'{"text": 5}', "line 1 has text = 5; expected a string. Mend it or leave it out."),
        (
            "a.jsonl",
            b'{"messages": []}',
            'has messages = []; expected [{"role": ..., "content": ...}, ...]. ',
        ),
        ("a.jsonl", b'{"messages": [{"from": "human"}]}', "has messages = [{'from': 'human'}]; expected [{"),
        (
            "a.jsonl",
            b'{"prompt": 1, "response": "b"}',
            "line 1 has prompt = 1, response = 'b'; expected strings, or each [{",
        ),
        (
            "a.jsonl",
            b'{"conversations": [{"from": "narrator", "value": "a"}]}',
            "has conversations = [{'from': 'narrator', 'value': 'a'}]; expected [{",
        ),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2 is not UTF-8 (byte 0xff)"),
        ("a.jsonl", b'{"text": "a"}\n\x00', "line 2 has a NUL byte; this is a binary file"),
        ("a.jsonl", b'{"id": 3}', "expected text, content, messages, conversations, prompt+completion, "),
        ("a.json", b'{\n "text": "a"\n}', "line 1 is not JSON"),
        ("a.json", b'[{"text": "a"}', "is not JSON"),
        ("a.json", b'[{"text": "a"}, {"id": 3}]', "object 1 has the keys ['id']"),
        ("a.txt", "text".encode("utf-16"), "line 1 is not UTF-8"),
        (
            "a.txt",
            gzip.compress(b"text", mtime=0),
            "is compressed with gzip. Decompress it, or let its name end in .gz",
        ),
        ("a.jsonl", gzip.compress(b"{}", mtime=0), "is compressed with gzip"),
        ("a.txt.gz", b"text", "is not a whole gzip file (Not a gzipped file"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "is not a whole gzip file"),
        ("a.txt.gz", gzip.compress(b"fine\n\x00", mtime=0), "line 2 has a NUL byte"),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), "has no text"),
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


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from([b"a", b"\n", b"\n\n", "é".encode(), b"\r\n", b"long line"])), st.integers(1, 9)
)
def test_lines_are_the_same_however_they_are_read(parts: list[bytes], block: int) -> None:
    data = b"".join(parts)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_BLOCK_BYTES", block)
        for path, written in (
            (Path(directory, "a.txt"), data),
            (Path(directory, "a.txt.gz"), gzip.compress(data)),
        ):
            path.write_bytes(written)
            blocks = list(documents._blocks(path))
            assert "".join(text for _, text in blocks).encode() == data
            assert [first for first, _ in blocks] == [
                1 + sum(text.count("\n") for _, text in blocks[:i]) for i in range(len(blocks))
            ]
            lines = data.decode().removesuffix("\n").split("\n") if data else []
            assert list(documents.read_lines(path)) == list(enumerate(lines, 1))


@pytest.mark.fault(51)
def test_a_file_takes_no_longer_than_what_is_used_of_it(tmp_path: Path) -> None:
    """Small files of endless rows, documents and lines: the first are read, and that is said."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 10_000_000))
    with pytest.raises(UsageError, match=r"a\.jsonl\.gz: the first 1000 rows have no text\. Give"):
        first_documents(path, 128 * 1000)
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 1_000_000))
    assert first_documents(path, 128 * 1000) == (["a"] * 1000, True)
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 9))
    assert first_documents(path, 128 * 1000) == (["a"] * 9, False)
    path.write_bytes(gzip.compress(b'{"text": "' + b"ab " * 1_000_000 + b'"}\n'))
    assert first_documents(path, 900) == (["ab " * 300], True)
    chat = {"messages": [{"role": "user", "content": "a"}] * 100}
    path.write_bytes(gzip.compress(json.dumps(chat).encode()))
    assert first_documents(path, 12800) == ([chat["messages"]], True)
    with pytest.raises(
        UsageError, match=r"document 0 has a chat of 100 messages and 100 characters; expected"
    ):
        first_documents(path, 12799)
    text = tmp_path / "a.txt.gz"
    text.write_bytes(gzip.compress(b"some words\n" * 5_000_000))
    (found,), is_part = first_documents(text, 5000)
    assert is_part and found == ("some words\n" * 500)[:5000]
    # Bytes count, of which some tokenizers make a token each.
    path.write_bytes(gzip.compress(b'{"text": "' + rb"\ud83d\ude00" * 1000 + b'"}\n'))
    assert first_documents(path, 400 + 3) == (["\U0001f600" * 100], True)


@pytest.mark.fault(51)
def test_a_part_that_is_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n' * 5000)
    assert read_source(Source(path), 1).notes == ()
    monkeypatch.setattr("quantkit.calibrate.data.texts.MAX_WORK", 12800)
    texts = read_source(Source(path), 1)
    assert texts.documents == ["abc"] * 100
    assert texts.notes == (
        f"{path}: only its first 300 characters were read; mix its rows if later ones are of another kind",
    )
    # Who asks for more samples gets what they are drawn from.
    assert len(read_source(Source(path), 1000).documents) == 375


@pytest.mark.fault(51)
@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.gz"])
def test_how_much_a_compressed_file_may_grow_depends_on_its_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1000)
    path = tmp_path / name
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 100_000))
    limit = 1000 if name == "a.json.gz" else 100 * path.stat().st_size
    with pytest.raises(UsageError, match=f"has more than {limit} bytes when decompressed"):
        read_documents(path)


@pytest.mark.fault(51)
def test_rows_of_endless_objects_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "more": [' + "{}," * 200_000 + "0]}")
    with pytest.raises(UsageError, match=r"line 1 has more than 200000 objects and lists\. Give a part"):
        read_documents(path)


@pytest.mark.fault(51)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_lists_of_endless_values_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(documents, "MAX_VALUES", 100)
    path = tmp_path / name
    row = '{"text": "' + "a" * 600 + '", "more": [' + "0," * 99 + "0]}"
    path.write_text(f"[{row}]" if name == "a.json" else row)
    assert read_documents(path) == ["a" * 600]
    row = row.replace("0,", "0,0,")
    path.write_text(f"[{row}]" if name == "a.json" else row)
    if name == "a.json":  # a larger file may have more
        path.write_text(f"[{row.replace('a' * 600, 'a' * 1600)}]")
        assert read_documents(path) == ["a" * 1600]
        path.write_text(f"[{row.replace('a' * 600, '')}]")
    with pytest.raises(UsageError, match=r"has more than 100 commas\. Give a part of it"):
        read_documents(path)


@pytest.mark.fault(51)
def test_parquet_of_endless_rows_pages_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.nulls(1_000_000, pyarrow.string())}), path)
    with pytest.raises(UsageError, match="the first 100 rows have no text"):
        first_documents(path, 12800)
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    rows = pyarrow.array([[None] * 300_000], pyarrow.list_(message))
    parquet.write_table(pyarrow.table({"messages": rows}), path)
    with pytest.raises(UsageError, match="row 0 has more than 200000 objects"):
        read_documents(path)
    parquet.write_table(
        pyarrow.table({"text": ["a" * 10_000] * 500}), path, compression="zstd", use_dictionary=False
    )
    assert len(read_documents(path)) == 500
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 1000)
    with pytest.raises(UsageError, match=r"a\.parquet: has more than \d+ bytes when decompressed"):
        read_documents(path)


@pytest.mark.fault(51)
def test_parquet_of_lists_that_are_read_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of some bytes may stand for any number of values, which are all there before they are counted."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(documents, "MAX_VALUES", 1000)
    path = tmp_path / "a.parquet"
    chat = [{"role": "user", "content": "hello"}]
    parquet.write_table(pyarrow.table({"messages": [chat] * 20_000}), path, use_dictionary=False)
    assert len(read_documents(path)) == 20_000
    rows = pyarrow.array([[None] * 100_000], pyarrow.list_(pyarrow.string()))
    parquet.write_table(pyarrow.table({"text": rows}), path)
    with pytest.raises(UsageError, match=r"has 99999 values in lists; expected at most 1000\. Give a part"):
        read_documents(path)


@pytest.mark.fault(50)
def test_parquet_of_values_that_python_has_no_type_for(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    text = pyarrow.string()
    for values in (
        pyarrow.array([2**62], pyarrow.timestamp("us")),
        pyarrow.array([2**30], pyarrow.date32()),
        pyarrow.array([1], pyarrow.timestamp("us", tz="Mars/Phobos")),
        pyarrow.array([[("a", "b")]], pyarrow.map_(text, text)),
    ):
        parquet.write_table(pyarrow.table({"text": values}), path)
        with pytest.raises(UsageError, match=r"a\.parquet: (is not a readable parquet file|row 0 has text)"):
            read_documents(path)

"""Files that are and are not text, and windows as slices of one token stream."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quantkit.calibrate.data.documents import read_text
from quantkit.errors import CheckpointError, UsageError
from quantkit.eval.text import check_tokens, cut, text_names, usable_window
from quantkit.model.tokenizer import tokenize


def written(tmp_path, data: bytes):
    path = tmp_path / "text.txt"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one\ntwo\n", "one\ntwo\n"),
        (b"\xef\xbb\xbfone\r\ntwo", "one\r\ntwo"),
        ("naïve 猫\n".encode(), "naïve 猫\n"),
        (b"\xef\xbb\xbf\xef\xbb\xbfx", "\ufeffx"),
    ],
)
def test_text_is_read_as_it_is(tmp_path, data, text):
    assert read_text(written(tmp_path, data)) == text


@pytest.mark.fault(50)
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no text"),
        (b" \n\t\r\n", "no text"),
        (b"\xef\xbb\xbf\n", "no text"),
        (b"one\ntwo\nth\xe9\n", r"line 3 is not UTF-8 \(byte 0xe9\)"),
        (b"\xef\xbb\xbfone\n\xff", "line 2 is not UTF-8"),
        ("text".encode("utf-16"), "line 1 is not UTF-8"),
        (b"one\ntwo\0", "line 2 has a NUL byte"),
    ],
)
def test_what_is_not_text_is_an_error(tmp_path, data, message):
    path = written(tmp_path, data)
    with pytest.raises(UsageError, match=message) as caught:
        read_text(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_or_directory_is_an_error(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            read_text(path)


def test_names_are_distinct(tmp_path):
    a, b, c = tmp_path / "a" / "t.txt", tmp_path / "b" / "t.txt", tmp_path / "c.txt"
    assert text_names([a, c]) == ("t.txt", "c.txt")
    assert text_names([a, b, c]) == (str(a), str(b), "c.txt")
    with pytest.raises(UsageError, match="given 2 times"):
        text_names([a, a])


class FakeTokenizer:
    """One token a character; adds a BOS token unless told not to."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        ids = [ord(character) for character in text]
        return {"input_ids": [1, *ids] if add_special_tokens else ids}


def test_no_token_is_added():
    assert tokenize(FakeTokenizer(), "ab").tolist() == [97, 98]


@given(length=st.integers(2, 200), window=st.integers(2, 50), most=st.none() | st.integers(1, 9))
def test_windows_are_consecutive_slices(length, window, most):
    stream = torch.arange(length)
    found = cut("t", stream, window, most)
    assert found.tokens.flatten().tolist() == stream[: found.tokens.numel()].tolist()
    if length < window:
        assert found.tokens.shape == (1, length)
        assert "short window" in found.notes[0]
    else:
        whole = length // window
        assert found.tokens.shape == (whole if most is None else min(whole, most), window)
        assert found.notes == ()


@given(
    length=st.integers(2, 200), window=st.integers(2, 20), stride=st.integers(1, 20), most=st.integers(1, 9)
)
def test_windows_of_a_stride_score_each_token_once_with_the_context_it_takes(length, window, stride, most):
    stream = torch.arange(length)
    if stride > window:
        with pytest.raises(UsageError, match=f"stride is {stride}; use 1 to {window}"):
            cut("t", stream, window, most, stride)
        return
    found = cut("t", stream, window, most, stride)
    scored = [token for row in found.tokens.tolist() for token in row[-found.scored :]]
    assert len(set(scored)) == len(scored)
    if length >= window:
        starts = range(0, length - window + 1, stride)[:most]
        assert found.tokens.tolist() == [list(range(start, start + window)) for start in starts]
        context = {token - row[0] for row in found.tokens.tolist() for token in row[-found.scored :]}
        assert min(context) >= max(1, window - stride)
        if stride < window:
            assert scored == list(range(window - stride, window - stride + len(scored)))


def test_too_little_text_is_an_error():
    for length in (0, 1):
        with pytest.raises(UsageError, match=f"has {length} tokens"):
            cut("t", torch.zeros(length, dtype=torch.int64), 8)
    with pytest.raises(UsageError, match="max_windows is 0"):
        cut("t", torch.arange(9), 4, 0)


def test_the_window_is_cut_to_the_positions_of_the_model():
    assert usable_window(512, 512) == (512, None)
    assert usable_window(512, None) == (512, None)
    window, note = usable_window(1024, 512)
    assert window == 512 and note is not None and "1024" in note and "512" in note
    with pytest.raises(UsageError, match="window is 1"):
        usable_window(1, 512)


def test_tokens_without_an_embedding_are_an_error(tmp_path):
    text = cut("t.txt", torch.tensor([0, 5, 2, 1]), 4)
    check_tokens(text, 6, tmp_path)
    with pytest.raises(CheckpointError, match=r"token 5 for t.txt.*5 rows"):
        check_tokens(text, 5, tmp_path)


def test_the_digest_tells_windows_apart():
    digests = {
        cut("t", torch.tensor([1, 2, 3, 4]), 4).digest,
        cut("t", torch.tensor([1, 2, 3, 4]), 2).digest,
        cut("t", torch.tensor([1, 2, 3, 5]), 4).digest,
    }
    assert len(digests) == 3
    assert cut("a", torch.arange(4), 2).digest == cut("b", torch.arange(4), 2).digest

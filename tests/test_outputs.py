"""What quantkit writes and says stays what it was: packed tensors, and the help of each command.

Where a change is meant to change them, write the files in `golden` anew, and look at the difference:

    python -m tests.outputs golden
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from .conftest import Run
from .outputs import DATA_FREE, GOLDEN, hashes, help_texts, output_hashes


@pytest.mark.parametrize("method", DATA_FREE)
def test_packed_tensors_are_the_same_bytes(run: Run, tmp_path: Path, method: str) -> None:
    """Each scheme by each method that needs no data; those with data depend on the machine's BLAS."""

    def command(*arguments: object) -> None:
        done = run(*arguments)
        assert done.code == 0, done.err

    golden = json.loads((GOLDEN / "outputs.json").read_text())
    assert output_hashes({method: DATA_FREE[method]}, tmp_path, command)[method] == golden[method]


def test_help_is_the_same(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    # Else usage begins with "python -m pytest".
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None)
    found = help_texts(lambda *arguments: run(*arguments).out)
    golden = (GOLDEN / "help.txt").read_text()
    # Versions of typer break lines in other places.
    if "".join(found.split()) != "".join(golden.split()):
        assert found == golden


def test_another_name_shape_dtype_or_byte_is_another_hash(tmp_path: Path) -> None:
    """Of the scheme whose linear it is, and of no other."""
    of = {"a": "int4", "b": "int8"}
    ones = torch.ones(2, 3)

    def hashed(**tensors: torch.Tensor) -> dict[str, str]:
        save_file(
            {name.replace("_", "."): one.clone() for name, one in tensors.items()}, tmp_path / "x.safetensors"
        )
        return hashes(tmp_path, of)

    before = hashed(a_codes=ones, b_codes=ones, norm=ones)
    assert set(before) == {"int4", "int8", "dense"}
    assert hashed(norm=ones, b_codes=ones, a_codes=ones) == before
    for name, other in (
        ("a_words", ones),
        ("a_codes", ones.reshape(3, 2)),
        ("a_codes", ones.int()),
        ("a_codes", -ones),
    ):
        after = hashed(**{name: other}, b_codes=ones, norm=ones)
        assert [scheme for scheme in before if before[scheme] != after[scheme]] == ["int4"]

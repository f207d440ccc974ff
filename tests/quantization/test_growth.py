"""An output that is larger than its source says why, and what helps."""

import re
from pathlib import Path

import gguf
import pytest

import quantkit
from quantkit.quantization.growth import larger_than_source

from ..checkpoint.gguf_files import tiny_model, tokenizer_metadata, write_gguf
from ..conftest import Run

STORIES = Path(__file__).parents[2] / "examples" / "stories260K"


def written(place: Path, table: str, *, tied: bool) -> Path:
    """A GGUF file with linears in Q4_1, and embedding and head in `table`."""
    model = tiny_model("llama", vocab_size=264, tie_word_embeddings=tied)

    def types(name: str, shape: tuple[int, ...]) -> str:
        if name in ("token_embd.weight", "output.weight"):
            return table
        return "Q4_1" if len(shape) == 2 else "F32"

    return write_gguf(place / f"{table}-{tied}.gguf", "llama", model, types, **tokenizer_metadata())


def warnings(source: Path, **options: object) -> list[str]:
    planned = quantkit.plan(source, **options)  # type: ignore[arg-type]
    found = [one for one in planned.warnings if "larger than the source" in one]
    assert bool(found) is (planned.output_bytes > planned.source_bytes)
    return found


@pytest.mark.parametrize(
    ("tied", "options", "causes", "helps"),
    [
        (
            True,
            {"format": "int4"},
            ["model.embed_tokens.weight, float32 here, Q8_0 there"],
            "--embeddings int8.",
        ),
        (
            False,
            {"format": "int4"},
            ["lm_head.weight, float32 here, Q8_0 there", "model.embed_tokens.weight, float32 here"],
            "--lm-head int8 or --embeddings int8.|--embeddings int8 or --lm-head int8.",
        ),
        (
            True,
            {"format": "int8", "embeddings": "int8"},
            ["the packed linears take"],
            "a --format of fewer bits.",
        ),
    ],
)
def test_causes_and_remedies(
    tmp_path: Path, tied: bool, options: dict[str, object], causes: list[str], helps: str
) -> None:
    (found,) = warnings(written(tmp_path, "Q8_0", tied=tied), **options)
    assert all(one in found for one in causes), found
    assert found.partition("What helps: ")[2] in helps.split("|")


def test_a_head_beside_the_table_that_it_shared_is_named() -> None:
    (found,) = warnings(STORIES, format="int8", rules=["model.layers.*=keep"], lm_head="int8")
    assert re.search(
        r": lm_head.* takes .* beside the table that it shared\. What helps: to leave --lm-head", found
    )


def test_what_helps_helps(tmp_path: Path) -> None:
    source = written(tmp_path, "Q8_0", tied=True)
    assert warnings(source, format="int4")
    assert not warnings(source, format="int4", embeddings="int8")
    assert not warnings(STORIES, format="int8")


def test_sizes_are_those_of_the_plan_and_of_the_file(tmp_path: Path) -> None:
    source = written(tmp_path, "Q8_0", tied=True)
    table = next(one for one in gguf.GGUFReader(source).tensors if one.name == "token_embd.weight")
    (found,) = warnings(source, format="int4")
    rows, columns = table.shape[1], table.shape[0]
    assert f"takes {4 * rows * columns / 1000:.2f} kB here and {table.n_bytes / 1000:.2f} kB there" in found


def test_plan_and_quantize_end_with_it(run: Run, tmp_path: Path) -> None:
    source = written(tmp_path, "Q8_0", tied=True)
    (expected,) = warnings(source, format="int4")
    planned = run("plan", source, "--format", "int4")
    done = run("quantize", source, tmp_path / "out", "--format", "int4", "--no-check")
    assert planned.code == done.code == 0
    for one in (planned, done):
        assert one.err.splitlines()[-1] == f"warning: {expected}"


def test_a_plan_that_is_not_larger_has_none() -> None:
    planned = quantkit.plan(STORIES, format="int4")
    assert larger_than_source(planned, None) == ()  # type: ignore[arg-type]

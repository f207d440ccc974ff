"""Calibration with images: what the processor makes of rows, the towers' inputs, and files that lie."""

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image

import quantkit
from quantkit.calibrate.data import pictures
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.hessian import Hessian
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.quantization.blockwise.calibration_data import read_samples

from ...publish.test_usage import llava
from ..matrix import tiny_model

CHAT = [{"type": "image", "path": "1.png"}, {"type": "text", "text": " Once upon a time"}]
ROWS = (
    {"text": " Once upon a tree", "images": ["0.png"]},
    {"messages": [{"role": "user", "content": CHAT}]},
    {"messages": [{"role": "user", "content": " Who wrote it"}], "images": ["2.png"]},
)
TOWER = "*vision_tower*=int8"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llava")
    processor, model = llava(), tiny_model("LlavaForConditionalGeneration")
    model.config.image_token_id = processor.image_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)
    return directory


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    for i in range(3):
        Image.effect_noise((40 + i, 30), 80).convert("RGB").save(tmp_path / f"{i}.png")
    return written(tmp_path, *ROWS)


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def options(path: Path, samples: int = 3, length: int = 24) -> CalibrationOptions:
    return CalibrationOptions(str(path), samples=samples, length=length)


def test_each_sample_is_a_row_and_then_text(source: Path, rows: Path) -> None:
    samples = read_samples(Checkpoint.open(source), options(rows), 272)
    assert samples.tokens.shape == (3, 24) and samples.notes == ()
    image = 4
    assert (samples.tokens == image).sum(1).tolist() == [4, 4, 4]
    assert [set(one) for one in samples.beside] == [{"pixel_values"}] * 3
    assert all(one["pixel_values"].shape == (1, 3, 28, 28) for one in samples.beside)
    # The row's own words follow its image; the tokenizer knows few of the text after them.
    first = {tuple(row[4:7].tolist()) for row in samples.tokens}
    words = llava().tokenizer
    assert first == {tuple(words(text)["input_ids"]) for text in ("Once upon a", "Who wrote it")}
    again = read_samples(Checkpoint.open(source), options(rows), 272)
    assert again.digest == samples.digest
    Image.new("RGB", (40, 30), "red").save(rows.parent / "0.png")
    assert read_samples(Checkpoint.open(source), options(rows), 272).digest != samples.digest


def test_hessians_are_those_of_hooks_on_the_whole_model(
    source: Path, rows: Path, tmp_path: Path, hessians: dict[str, Hessian]
) -> None:
    """With weights that stay what they were, so that every linear sees what it does in the original."""
    made = quantkit.quantize(
        *(source, tmp_path / "out"),
        format="int8",
        method="gptq",
        rules=(TOWER, "*multi_modal_projector*=int8"),
        calibration=options(rows),
        device="cpu",
    )
    linears = {one.linear.module for one in made.plan.layers if one.scheme is not None}
    assert set(hessians) == linears and any("vision_tower" in name for name in linears)
    assert any("multi_modal_projector" in name for name in linears)
    model = transformers.LlavaForConditionalGeneration.from_pretrained(source, dtype=torch.float32)
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in hessians}
    for name in hessians:
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, given, name=name: inputs[name].append(given[0].flatten(0, -2).double())
        )
    samples = read_samples(Checkpoint.open(source), options(rows), 272)
    with torch.no_grad():
        for tokens, beside in zip(samples.tokens, samples.beside, strict=True):
            model(input_ids=tokens[None], **beside)
    for name, hessian in hessians.items():
        x = torch.cat(inputs[name])
        assert hessian.tokens == len(x)
        torch.testing.assert_close(hessian.matrix.double(), x.T @ x / len(x), rtol=1e-3, atol=1e-3)


def test_a_tower_has_no_inputs_of_text(source: Path, tmp_path: Path) -> None:
    path = written(tmp_path, {"text": " Once upon a time" * 20})
    with pytest.raises(
        UsageError, match=r"vision_tower.* does not run on text.*\.jsonl file whose rows name images"
    ):
        quantkit.quantize(
            *(source, tmp_path / "out"),
            method="gptq",
            rules=(TOWER,),
            calibration=options(path, 1),
            device="cpu",
        )
    assert not (tmp_path / "out").exists()


def bomb(path: Path) -> None:
    """A PNG of a few bytes that says it has 2^32 pixels."""
    header = struct.pack(">IIBBBBB", 1 << 16, 1 << 16, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.png", r"image 'missing\.png' is not there .*Check its name"),
        ("/etc/passwd", "expected the name of a file in the folder"),
        ("../outside.png", "expected the name of a file in the folder"),
        ("https://example.org/a.png", "expected the name of a file in the folder"),
        (7, "has the image 7; expected the name of a file"),
        ("link.png", r"image 'link\.png' is no file in"),
        ("folder", "is no file in"),
        ("bomb.png", r"has 4294967296 pixels; expected at most|is not a readable"),
        ("text.png", "is not a readable JPEG, PNG or WEBP file"),
        ("large.png", r"has \d+ bytes; expected at most 1000"),
    ],
)
def test_images_that_lie_are_refused_before_work(
    source: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: Any, message: str
) -> None:
    folder = rows.parent
    (folder.parent / "outside.png").write_bytes((folder / "0.png").read_bytes())
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder / "folder").mkdir()
    bomb(folder / "bomb.png")
    (folder / "text.png").write_text("no image")
    (folder / "large.png").write_bytes(b"\0" * 1001)
    if name == "large.png":
        monkeypatch.setattr(pictures, "MAX_BYTES", 1000)
    path = written(folder, {"text": " Once", "images": [name]})
    with pytest.raises(UsageError, match=message):
        quantkit.quantize(
            *(source, tmp_path / "out"), format="int8", method="gptq", calibration=options(path), device="cpu"
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "names 0 images and has 1 places"),
        ({"messages": ["hello"], "images": ["0.png"]}, "expected role and content"),
        ({"text": " Once upon a time" * 20, "images": ["0.png"]}, "no row fits into a sample of 24 tokens"),
    ],
)
def test_rows_that_do_not_fit_their_images(source: Path, rows: Path, row: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_samples(Checkpoint.open(source), options(written(rows.parent, row)), 272)


def test_sources_with_and_without_images_are_not_mixed(source: Path, rows: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_text(json.dumps({"text": " Once upon a time" * 20}))
    asked = CalibrationOptions(f"{rows},{plain}", samples=4, length=24)
    with pytest.raises(UsageError, match=r"plain\.jsonl has no rows with images"):
        read_samples(Checkpoint.open(source), asked, 272)


def test_truncated_pixels_name_their_file(source: Path, rows: Path) -> None:
    data = (rows.parent / "0.png").read_bytes()
    (rows.parent / "0.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(UsageError, match=r"image .*0\.png cannot be decoded"):
        read_samples(Checkpoint.open(source), options(rows), 272)

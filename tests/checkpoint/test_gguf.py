"""GGUF files: values of every block type, names of every architecture, the files that metadata stand for."""

import errno
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import pytest
import torch

from quantkit.checkpoint.gguf import open_gguf as open_gguf_module
from quantkit.checkpoint.gguf.block_types import BLOCK_TYPES, BlockType
from quantkit.checkpoint.gguf.gguf_names import ARCHITECTURES
from quantkit.checkpoint.gguf.open_gguf import gguf_file, open_gguf
from quantkit.checkpoint.gguf.rows import GgufRows
from quantkit.checkpoint.open_source import open_source
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError, EnvironmentProblem
from quantkit.model.prefixes import read_names

from ..support.compare import assert_equal
from .gguf_files import (
    BY_NAME,
    CHAT_TEMPLATE,
    MODELS,
    random_blocks,
    tiny_model,
    tokenizer_metadata,
    write_gguf,
)

BLOCKS = [one for one in BLOCK_TYPES.values() if one.dtype is None]


def rows_of(kind: BlockType, rows: int, blocks: int, **more: Any) -> tuple[GgufRows, Any, np.ndarray]:
    """A tensor of random blocks, what reads its bytes, and its values by the package gguf."""
    data = random_blocks(kind, rows, blocks)
    expected = gguf.dequantize(data, gguf.GGMLQuantizationType(kind.number))

    def read(
        tensor: StoredTensor, start: int = 0, stop: int | None = None, columns: tuple[int, int] | None = None
    ) -> torch.Tensor:
        assert (tensor.dtype, tensor.shape) == ("U8", data.shape)
        return torch.from_numpy(data)[start:stop].clone()

    tensor = GgufRows(
        "a", "F32", expected.shape, Path("a.gguf"), 0, block_type=kind, row_bytes=data.shape[1], **more
    )
    return tensor, read, expected


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_values_are_those_of_llama_cpp(kind: BlockType) -> None:
    """Every code is there, with scales of both signs, subnormal ones among them."""
    tensor, read, expected = rows_of(kind, 96, 5 if kind.elements == 32 else 2)
    found = tensor.values(read, 0, 96)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)
    np.testing.assert_array_equal(tensor.values(read, 33, 40).numpy(), expected[33:40])
    spec, grid = tensor.grid_spec, tensor.grid(read, 7, 96)
    assert (spec is None) == (grid is None) == (kind.grid is None)
    if grid is not None:
        assert spec is not None
        assert grid.codes.shape == (89, expected.shape[1])
        assert len(grid.codes.unique()) == len([v for v in spec.format.values if v == v])
        np.testing.assert_array_equal(grid.values().numpy(), expected[7:])


def test_blocks_without_a_grid_have_the_values_of_transformers() -> None:
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    for kind in BLOCKS:
        if kind.number in dequant.GGML_BLOCK:
            tensor, read, _ = rows_of(kind, 3, 2)
            data = torch.from_numpy(random_blocks(kind, 3, 2))
            expected = dequant.dequantize(data.flatten(), kind.number).view(3, -1)
            assert_equal(tensor.values(read, 0, 3), expected, kind.name)


@pytest.mark.parametrize(("heads", "rows"), [(1, 2), (3, 24), (2, 64)])
def test_rows_of_a_permuted_tensor_are_in_order_wherever_it_is_cut(heads: int, rows: int) -> None:
    tensor, read, expected = rows_of(BY_NAME["Q4_1"], rows, 2, heads=heads)
    size = rows // heads
    # Row i of a half is at 2 i of the stored head, that of the other half at 2 i + 1.
    order = [
        head * size + 2 * (row % (size // 2)) + row // (size // 2)
        for head in range(heads)
        for row in range(size)
    ]
    for start in range(0, rows, 5):
        for stop in (start + 1, (start + rows) // 2 + 1, rows):
            if start < stop:
                wanted = expected[order[start:stop]]
                np.testing.assert_array_equal(tensor.values(read, start, stop).numpy(), wanted)
                grid = tensor.grid(read, start, stop)
                assert grid is not None
                np.testing.assert_array_equal(grid.values().numpy(), wanted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_file_has_the_weights_of_the_model_that_it_was_made_of(arch: str, tmp_path: Path) -> None:
    model = tiny_model(arch)
    more = {"general__name": "tiny", "tokenizer__ggml__padding_token_id": 0}
    checkpoint, structure = read_names(open_gguf(write_gguf(tmp_path / "tiny.gguf", arch, model, **more)))
    assert checkpoint.config["model_type"] == MODELS[arch][0]
    assert structure.linears
    expected = dict(model.state_dict())
    for name, tensor in checkpoint.tensors.items():
        found = checkpoint.read(name)
        assert found.shape == tensor.shape
        if ".experts." in name:
            layer, number, which = name.partition(".experts.")[0], *name.split(".experts.")[1].split(".")[:2]
            fused = expected[f"{layer}.experts.{'down_proj' if which == 'down_proj' else 'gate_up_proj'}"]
            wanted = fused[int(number)]
            if which != "down_proj":
                wanted = wanted.chunk(2)[which == "up_proj"]
        else:
            wanted = expected[name]
        assert_equal(found, wanted, name)


@pytest.mark.parametrize("full", [False, True])
def test_a_temporary_directory_without_room_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "llama", tiny_model("llama"))
    code = errno.ENOSPC if full else errno.ENOENT

    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    owner, name = (open_gguf_module, "write_outline") if full else (tempfile, "mkdtemp")
    monkeypatch.setattr(owner, name, refuse)
    with pytest.raises(EnvironmentProblem) as caught:
        open_gguf(path)
    assert str(caught.value) == (
        f"{path}: its config.json and tokenizer cannot be written to the temporary directory: "
        f"{os.strerror(code)} ({errno.errorcode[code]}). Make space there, or name another directory in "
        "TMPDIR."
    )


def test_metadata_become_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab_size=264)
    path = write_gguf(tmp_path / "tiny.gguf", "llama", model, general__name="tiny", **tokenizer_metadata())
    checkpoint = open_source(path)
    assert [file.name for file in checkpoint.side_files] == [
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert (checkpoint.directory / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    generation = json.loads((checkpoint.directory / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": [0, 2]}
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert checkpoint.config["dtype"] == "float32"
    assert checkpoint.notes == ("read from tiny.gguf: 21 F32. What is not packed is float32.",)
    # The same bytes are the same source, whatever was made of them when they were opened.
    assert open_source(tmp_path).fingerprint() == checkpoint.fingerprint()
    checkpoint.check_unchanged()


def test_a_directory_with_several_files_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"has a\.gguf, b\.gguf; expected one\. Give the path"):
        gguf_file(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert gguf_file(tmp_path) is None


@pytest.mark.parametrize(
    ("arch", "metadata", "expected"),
    [
        ("mpt", {}, r"general\.architecture is 'mpt'; quantkit knows the names of llama, qwen2"),
        ("llama", {"llama__expert_count": 8}, r"is 'llama' with experts; quantkit knows"),
        ("llama", {"split__count": 2}, r"is one of 2 files of a model; expected all in one\. Join them"),
        ("llama", {"llama__attention__head_count": 5}, r"has 64 rows for 5 heads; expected pairs of rows"),
        (
            "llama",
            {"llama__attention__head_count": "x"},
            r"'llama\.attention\.head_count' is 'x'; expected int",
        ),
    ],
)
def test_files_that_are_no_model_are_refused(
    tmp_path: Path, arch: str, metadata: dict[str, Any], expected: str
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", arch)
    for key, value in metadata.items():
        (writer.add_uint32 if isinstance(value, int) else writer.add_string)(key.replace("__", "."), value)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=expected):
        open_gguf(tmp_path / "a.gguf")


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", tiny_model("llama"), general__name="a")
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_norm.weight", b"blk.0.atom_norm.weight"))
    with pytest.raises(
        CheckpointError, match=r"does not know where tensor 'blk\.0\.atom_norm\.weight' of shape"
    ):
        open_gguf(path)


def test_constants_of_rotary_embeddings_are_left_out_with_a_warning(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.register_parameter("rope_freqs", torch.nn.Parameter(torch.linspace(1, 3, 8)))
    path = write_gguf(tmp_path / "a.gguf", "llama", model, general__name="a")
    checkpoint = open_gguf(path)
    assert len(checkpoint.tensors) == 21
    assert [warning.partition(": ")[2][:50] for warning in checkpoint.warnings] == [
        "rope_freqs.weight scales rotary embeddings, and th"
    ]


def test_factors_of_llama_3_are_recognized(tmp_path: Path) -> None:
    """llama.cpp divides frequencies by the factors, where transformers scales by the rule."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    model = tiny_model("llama", rope_parameters=rope, max_position_embeddings=131072)
    plain = 500000.0 ** -(torch.arange(8) / 8)
    factors = plain / model.model.rotary_emb.inv_freq
    assert len(factors.unique()) > 2
    model.register_parameter("rope_freqs", torch.nn.Parameter(factors))
    checkpoint = open_gguf(write_gguf(tmp_path / "a.gguf", "llama", model, general__name="a"))
    assert checkpoint.config["rope_parameters"] == rope
    assert not checkpoint.warnings

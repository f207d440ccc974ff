"""A low-bit checkpoint seen as a source: its names, config and notes, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.low_bit.low_bit_formats import FORMATS
from quantkit.checkpoint.source import HEADERS_ONLY_NAME, Checkpoint
from quantkit.errors import CheckpointError

from ...support.compare import assert_equal
from .makers import CASES, FP8_CONFIG, Made, every, float8, fp8_blocks, gptq, opened, pack_quantized, write

ONES = torch.ones(3)


def made(name: str, seed: int = 0) -> Made:
    torch.manual_seed(seed)
    return CASES[name]()


def refusal(directory: Path, parts: dict[str, torch.Tensor], section: Any = None, **config: Any) -> str:
    """The error of a checkpoint, when it is opened or, if it is, when all of it is read."""
    with pytest.raises(CheckpointError) as caught:
        checkpoint = opened(directory, parts, section, **config)
        for name in checkpoint.tensors:
            checkpoint.read(name)
    return str(caught.value).removeprefix(f"{directory}")


def test_plain_checkpoints_are_themselves(tmp_path: Path) -> None:
    parts = {"m.weight": ONES, "ids": torch.arange(3), "mask": torch.ones(2, dtype=torch.uint8)}
    checkpoint = Checkpoint.open(write(tmp_path, parts, None))
    assert dequantized(checkpoint) is checkpoint


def test_parts_become_one_tensor_in_the_place_of_the_codes(tmp_path: Path) -> None:
    one, two = made("fp8 blocks"), made("awq", 1)
    parts = {"a.bias": ONES, "norm.weight": ONES, **one.parts}
    parts |= {name.replace("m.", "n."): part for name, part in two.parts.items()}
    # Names that only activations have.
    parts |= {"m.input_scale": ONES, "attn.k_scale": ONES, "n.bias": ONES}
    config = {"dtype": "float16", "text_config": {"quantization_config": FP8_CONFIG, "a": 1}}
    checkpoint = opened(tmp_path, parts, two.section, **config)
    assert set(checkpoint.tensors) == {"a.bias", "norm.weight", "m.weight", "n.weight", "n.bias"}
    assert all(tensor.name == name for name, tensor in checkpoint.tensors.items())
    assert checkpoint.config == {"dtype": "float16", "text_config": {"a": 1}}
    assert not checkpoint.is_quantized
    assert checkpoint.tensors["m.weight"].dtype == "F16"
    # Bytes are those of the file but for what is left out.
    stored = sum(part.nbytes for name, part in parts.items() if not name.endswith(("input_scale", "k_scale")))
    assert checkpoint.nbytes == stored


def test_a_note_says_what_was_read(tmp_path: Path) -> None:
    one, two = made("fp8 blocks"), made("awq")
    parts = one.parts | {name.replace("m.", "n."): part for name, part in two.parts.items()}
    (note,) = opened(tmp_path, parts, FP8_CONFIG).notes
    assert note == (
        "the source is low-bit already: of its weights 1 are FP8 with block scales and 1 are AWQ, "
        "dequantized as they are read. The errors of both roundings add up. `quantkit convert` keeps every "
        "value where a format has the same grid."
    )


@pytest.mark.parametrize(
    "section",
    [
        {"activation_scheme": "dynamic"},
        {"config_groups": {"group_0": {"input_activations": {"num_bits": 8}}}},
    ],
)
def test_a_source_that_rounds_its_inputs_says_so(tmp_path: Path, section: dict[str, Any]) -> None:
    _, note = opened(tmp_path, made("fp8 blocks").parts, {**FP8_CONFIG, **section}).notes
    assert note == (
        "by quantization_config of config.json linears of the source round their inputs too. Those of the "
        "result do only where --activations or --scheme of `quantkit quantize` says so."
    )


def test_files_of_other_tools_are_not_copied(tmp_path: Path) -> None:
    one = made("gptq v2")
    write(tmp_path, one.parts, None, dtype="float32")
    (tmp_path / "quantize_config.json").write_text(json.dumps(one.section))
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint = dequantized(Checkpoint.open(tmp_path))
    assert [path.name for path in checkpoint.side_files] == ["tokenizer.json"]
    assert_equal(checkpoint.read("m.weight"), one.expected())


def test_renamed_weights_are_read_as_before(tmp_path: Path) -> None:
    one = made("fp8 blocks")
    checkpoint = opened(tmp_path, one.parts, one.section, dtype="float32")
    renamed = replace(checkpoint, tensors={"x": replace(checkpoint.tensors["m.weight"], name="x")})
    assert_equal(renamed.read("x", 1, 9), one.expected()[1:9])


def test_rows_outside_are_an_index_error(tmp_path: Path) -> None:
    one = made("awq")
    checkpoint = opened(tmp_path, one.parts, one.section)
    with pytest.raises(IndexError, match="has 40 rows"):
        checkpoint.read("m.weight", 0, 41)


def test_every_row_of_the_table_has_a_case(tmp_path: Path) -> None:
    found = set()
    for i, name in enumerate(CASES):
        one = made(name)
        found.add(opened(tmp_path / str(i), one.parts, one.section).tensors["m.weight"].stored_as)
    assert found == {row.name for row in FORMATS}


def test_float8_without_scales_is_refused_with_that_reason(tmp_path: Path) -> None:
    one = fp8_blocks(8, 8)
    codes = one.parts["m.weight"]
    told = (
        ": the checkpoint is quantized already: tensor 'm.weight' is F8_E4M3 and has no scales, without "
        "which its numbers are not the weights; expected plain weights, or scales. Start from the original "
        "checkpoint."
    )
    assert refusal(tmp_path, {"m.weight": codes}) == told
    assert refusal(tmp_path, {"m.weight": codes}, FP8_CONFIG) == told
    # Scales of a dtype that scales have not.
    odd = torch.ones(1, 1, dtype=torch.int64)
    assert refusal(tmp_path, {"m.weight": codes, "m.weight_scale_inv": odd}, FP8_CONFIG) == told
    # One of many that has none.
    assert "'n.weight' is F8_E4M3 and has no scales" in refusal(tmp_path, {**one.parts, "n.weight": codes})
    # Scales that belong to nothing.
    assert "'x' is F8_E8M0 and has no scales" in refusal(
        tmp_path, {"m.weight": ONES, "x": torch.ones(2).to(torch.float8_e8m0fnu)}
    )


def test_own_directories_are_refused(tmp_path: Path) -> None:
    for section in ({"quant_method": "quantkit"}, {"quant_method": "compressed-tensors", "quantkit": {}}):
        text = refusal(tmp_path, pack_quantized(4, 8, 32, 32).parts, section)
        assert "is quantkit's own; expected plain weights, or what another tool packed. Start from" in text


@pytest.mark.parametrize(
    ("name", "part", "value", "text"),
    [
        (
            "fp8 blocks",
            "m.weight_scale_inv",
            torch.ones(3, 3),
            "its scales fit no blocks of 'm.weight' [130, 140]",
        ),
        (
            "fp8 blocks",
            "m.weight_scale_inv",
            torch.full((2, 2), torch.nan),
            "it has a scale that is NaN or inf",
        ),
        (
            "fp8 channel",
            "m.weight_scale",
            torch.full((13, 1), torch.inf),
            "it has a scale that is NaN or inf",
        ),
        ("fp8 channel", "m.weight_scale", torch.ones(12, 1), "its scales fit no blocks"),
        ("mxfp8", "m.weight_scale", torch.full((9, 3), 255, dtype=torch.uint8), "NaN or infinite"),
        ("mxfp4", "m.weight_scale", torch.ones(9, 7, dtype=torch.uint8), "its scales fit no blocks"),
        (
            "mxfp4",
            "m.weight_scale",
            torch.ones(3, 3, dtype=torch.uint8),
            "expected the scales of groups of each",
        ),
        ("nvfp4", "m.weight_global_scale", torch.zeros(1), "it is zero, NaN or infinite"),
        ("nvfp4", "m.weight_global_scale", torch.ones(2), "expected one number"),
        (
            "int8",
            "m.weight_zero_point",
            torch.ones(10, 1, dtype=torch.int8),
            "its scale 'm.weight_scale' needs",
        ),
        ("pack-quantized 4", "m.weight_shape", torch.tensor([37, 97]), "no width and layout of codes fits"),
        (
            "pack-quantized 4",
            "m.weight_shape",
            torch.tensor([36, 96]),
            "says [36, 96], which needs other words",
        ),
        ("pack-quantized 4", "m.weight_shape", torch.tensor([37, 1 << 60]), "which needs other words"),
        ("pack-quantized 4", "m.weight_shape", torch.tensor([37, -1]), "which needs other words"),
        ("pack-quantized 4", "m.weight_shape", torch.tensor([37]), "expected the two sizes"),
        ("pack-quantized 4", "m.weight_zero_point", torch.ones(4, 3).int(), "needs [5, 3]"),
        ("pack-quantized g_idx", "m.weight_g_idx", torch.full((64,), 4).int(), "expected 0 to 3"),
        (
            "pack-quantized g_idx",
            "m.weight_g_idx",
            torch.ones(63).int(),
            "a group for each column needs [64]",
        ),
        ("gptq 4", "m.qzeros", torch.ones(3, 9).int(), "its shape fits no width"),
        ("gptq 4", "m.scales", torch.ones(4, 64), "needs [4, 8]"),
        ("gptq 4", "m.g_idx", torch.full((96,), -2).int(), "it has groups from -2 to -2; expected 0 to 2"),
        ("awq", "m.qzeros", torch.ones(3, 6).int(), "its scales 'm.scales' needs [3, 5]"),
        ("awq", "m.scales", torch.ones(3, 41), "neither as GPTQ nor as AWQ"),
        ("bitsandbytes nf4", "m.weight.absmax", torch.ones(34), "in blocks of 64 needs 33 scales"),
        ("bitsandbytes nf4", "m.weight", torch.ones(7, 1, dtype=torch.uint8), "needs 1056 bytes"),
        (
            "bitsandbytes nf4",
            "m.weight.quant_state.bitsandbytes__nf4",
            torch.tensor(list(b"[]"), dtype=torch.uint8),
            "it is no state as bitsandbytes writes it",
        ),
        ("bitsandbytes int8", "m.SCB", torch.ones(10), "expected one scale for each row"),
        (
            "bitnet",
            "m.weight",
            torch.full((11, 37), 255, dtype=torch.uint8),
            "it has the code 3; expected 0, 1",
        ),
        ("bitnet divides", "m.weight_scale", torch.zeros(1), "it is zero, NaN or infinite"),
        ("mlx 4", "m.biases", torch.ones(5, 3), "its scales 'm.scales' needs [5, 2]"),
        ("mlx 4", "m.scales", torch.ones(4, 2), "expected the scales of each row"),
    ],
)
def test_parts_that_do_not_fit_are_named(
    tmp_path: Path, name: str, part: str, value: torch.Tensor, text: str
) -> None:
    one = made(name)
    assert part in one.parts
    found = refusal(tmp_path, {**one.parts, part: value}, one.section)
    assert text in found and str(tmp_path / "model.safetensors") in f"{tmp_path}{found}"
    assert found.endswith(".") and "tensor '" in found
    # Nothing is missing from these files.
    assert "ownload" not in found


def test_the_config_decides_what_shapes_leave_open(tmp_path: Path) -> None:
    one = made("gptq 4")
    assert one.section is not None
    other = {key: value for key, value in one.section.items() if key != "checkpoint_format"}
    assert_equal(opened(tmp_path, one.parts, other, dtype="float32").read("m.weight"), one.expected())
    for section, text in (
        (
            None,
            "config.json, without a quantization_config, says format None; expected gptq, gptq_v2, gptq_p",
        ),
        ({**one.section, "checkpoint_format": "marlin"}, "says format 'marlin'"),
    ):
        assert text in refusal(tmp_path, one.parts, section)
    auto = {**other, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    assert_equal(opened(tmp_path, one.parts, auto, dtype="float32").read("m.weight"), one.expected())
    one = made("awq")
    for change in ({"version": "gemv"}, {"bits": 8}):
        assert "quantkit reads AWQ of version 'gemm'" in refusal(
            tmp_path, one.parts, {**(one.section or {}), **change}
        )
    one = made("mlx 4")
    for section, text in (
        ({"group_size": 64, "bits": 5}, "5 bits, as quantization_config of config.json says, do not fit"),
        ({"group_size": 64, "mode": "mxfp4"}, "says mode 'mxfp4'"),
        ({}, "says group_size None"),
        ({"group_size": 64, "m": {"group_size": 32, "bits": 4}}, "do not fit 64 columns"),
    ):
        assert text in refusal(tmp_path, one.parts, {"quant_method": "mlx", **section})


@pytest.mark.parametrize(
    "section",
    [
        {"quant_method": "fp8", "weight_block_size": [48, 40]},
        {"config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [48, 40]}}}},
    ],
)
def test_blocks_are_as_large_as_the_config_says(tmp_path: Path, section: dict[str, Any]) -> None:
    """100 rows in 3 blocks may be of 34 to 49 rows."""
    torch.manual_seed(0)
    codes, scale = float8(every(100, 90, 256)), torch.rand(3, 3)
    parts = {"m.weight": codes, "m.weight_scale_inv": scale}
    large = scale.repeat_interleave(48, 0)[:100].repeat_interleave(40, 1)[:, :90]
    assert_equal(opened(tmp_path, parts, section, dtype="float32").read("m.weight"), codes.float() * large)
    assert "its scales fit no blocks" in refusal(tmp_path, parts, {"quant_method": "fp8"})


def test_two_layouts_of_as_many_words_are_refused(tmp_path: Path) -> None:
    """70 codes of 3 bits take 7 words, whether codes may straddle words or not."""
    one = pack_quantized(3, 5, 70, 70)
    text = refusal(tmp_path, one.parts, one.section)
    assert "more than one width and layout of codes fits [5, 70]" in text and "says 3 bits" in text


def test_a_fused_global_scale_is_that_of_each_matrix(tmp_path: Path) -> None:
    torch.manual_seed(0)
    packed, scale = (
        every(24, 16, 256).to(torch.uint8).view(3, 8, 16),
        float8(every(24, 2, 120) + 1).view(3, 8, 2),
    )
    divisors = torch.tensor([2.0, 3.0, 4.0])
    parts = {"e.up_packed": packed, "e.up_scale": scale, "e.up_global_scale": divisors}
    whole = opened(tmp_path / "whole", parts, FP8_CONFIG, dtype="float32").read("e.up")
    for i in range(3):
        each = {"e.up_packed": packed[i], "e.up_scale": scale[i], "e.up_global_scale": divisors[i : i + 1]}
        one = opened(tmp_path / str(i), each, FP8_CONFIG, dtype="float32").read("e.up")
        assert_equal(whole[i], one)


@pytest.mark.parametrize("name", ["fp8 blocks", "mxfp4", "gptq 4", "awq"])
def test_headers_are_enough_for_a_plan(tmp_path: Path, name: str) -> None:
    one = made(name)
    write(tmp_path, one.parts, one.section)
    (tmp_path / HEADERS_ONLY_NAME).touch()
    checkpoint = dequantized(Checkpoint.open(tmp_path))
    assert checkpoint.tensors["m.weight"].shape == one.shape
    with pytest.raises(CheckpointError, match="only the header was downloaded"):
        checkpoint.read("m.weight")


@pytest.mark.parametrize("name", ["bitsandbytes nf4", "pack-quantized 4"])
def test_shapes_that_are_data_need_the_data(tmp_path: Path, name: str) -> None:
    write(tmp_path, made(name).parts, {"quant_method": "without widths"})
    (tmp_path / HEADERS_ONLY_NAME).touch()
    told = r"only headers were downloaded\. Download the whole checkpoint"
    with pytest.raises(CheckpointError, match=told):
        dequantized(Checkpoint.open(tmp_path))


@pytest.mark.parametrize(("bits", "size"), [(4, 32), (3, 32), (4, None)])
def test_columns_of_packed_words_follow_from_groups_or_words(
    tmp_path: Path, bits: int, size: int | None
) -> None:
    one = pack_quantized(bits, 37, 96, size or 96)
    weights = {"num_bits": bits, "type": "int", "group_size": size}
    section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    write(tmp_path, one.parts, section)
    (tmp_path / HEADERS_ONLY_NAME).touch()
    assert dequantized(Checkpoint.open(tmp_path)).tensors["m.weight"].shape == (37, 96)


def test_permuted_groups_are_told_from_consecutive_ones(tmp_path: Path) -> None:
    torch.manual_seed(0)
    for permuted in (False, True):
        one = gptq(4, 40, 64, 16, permuted=permuted)
        checkpoint = opened(tmp_path / str(permuted), one.parts, one.section)
        assert checkpoint.tensors["m.weight"].weight.spec.permuted is permuted  # type: ignore[attr-defined]


def test_bonsai_is_binary_without_biases(tmp_path: Path) -> None:
    one = made("bonsai")
    spec = opened(tmp_path / "a", one.parts, one.section).tensors["m.weight"].weight.spec  # type: ignore[attr-defined]
    assert (spec.format.name, spec.affine, spec.group_size) == ("binary", "none", 128)
    one = made("mlx 1")
    spec = opened(tmp_path / "b", one.parts, one.section).tensors["m.weight"].weight.spec  # type: ignore[attr-defined]
    assert (spec.format.name, spec.affine) == ("int1", "biases")

"""`quantkit merge`: what the adapter changes is rounded from the original, and all else is copied."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.lora_adapter import LoraAdapter
from quantkit.checkpoint.manifest import read_manifest
from quantkit.errors import CheckpointError, OutputError, QuantkitError, UsageError
from quantkit.merging import merge

from ..support.compare import assert_equal

peft = pytest.importorskip("peft", reason="adapters are made by PEFT, of the extra 'test'")

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "stories260K"
TARGETS = ["q_proj", "down_proj"]
IDS = torch.arange(400, 300, -1)[None]


@pytest.fixture(autouse=True)
def small_products(one_thread: None, few_windows: None) -> None:
    """Also where no command runs."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merge") / "packed"
    quantkit.quantize(MODEL, out, format="int4")
    return out


def make_adapter(out: Path, packed: Path, ids: torch.Tensor = IDS, **options: Any) -> Path:
    """An adapter of PEFT, trained for some steps to go on with tokens in reverse order."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": TARGETS, **options}
    torch.manual_seed(0)
    model = peft.get_peft_model(quantkit.load(packed, dtype="float32"), peft.LoraConfig(**options))
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=2e-3)
    for _ in range(12):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def adapter(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("merge") / "adapter", packed)


def delta_of(adapter: Path, packed: Path, module: str) -> torch.Tensor:
    """s B A of `module` as PEFT computes it."""
    model = peft.PeftModel.from_pretrained(quantkit.load(packed, dtype="float32"), adapter)
    return model.base_model.model.get_submodule(module).get_delta_weight("default").detach()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_only_what_the_adapter_changes_is_rounded_again(packed: Path, adapter: Path, tmp_path: Path) -> None:
    text = EXAMPLES / "stories.txt"
    result = merge(packed, adapter, tmp_path / "out", text=text)
    before, after = tensors_of(packed), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name.rpartition(".")[0] for name in changed} == set(result.methods)
    assert len(result.methods) == 2 * 5 and set(result.methods.values()) == {"mse"}
    module = "model.layers.2.self_attn.q_proj"
    original = tensors_of(MODEL)[f"{module}.weight"].float() + delta_of(adapter, packed, module)
    found = quantkit.load(tmp_path / "out").get_submodule(module).packed
    expected = quantkit.quantize_tensor(original, found.scheme)
    assert_equal((found.words, found.scale), (expected.words, expected.scale))
    layer = read_manifest(tmp_path / "out")["layers"][module]
    assert layer["reason"] == "default, merged with a LoRA"
    assert layer["relative_error"] == pytest.approx(result.relative_errors[module])
    assert result.text is not None and result.text.excess is not None
    # Most of the adapter is lost where the dequantized weights are rounded again.
    lost = merge(packed, adapter, tmp_path / "lost", text=text, from_packed=True)
    assert lost.text is not None and lost.text.excess is not None
    assert abs(result.text.excess) < 0.25 * abs(lost.text.excess)
    assert repr(result).startswith(f"MergeResult('{tmp_path}/out', 10 linears merged, ")


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {r"layers.1.self_attn.q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
        {"rank_pattern": {r".*\.0\.self_attn\.q_proj": 2}},
        {"r": 1, "lora_alpha": 3},
    ],
)
def test_factors_are_scaled_as_peft_scales_them(options: Any, packed: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "adapter", packed, **options)
    found = LoraAdapter.open(adapter)
    model = peft.PeftModel.from_pretrained(quantkit.load(packed, dtype="float32"), adapter)
    for module in found.factors:
        expected = model.base_model.model.get_submodule(module).get_delta_weight("default").detach()
        torch.testing.assert_close(found.delta(module), expected, rtol=1e-6, atol=0)


def test_a_dense_linear_gets_the_sum_in_its_dtype(tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    quantkit.quantize(MODEL, packed, format="int4", rules=("*.q_proj=keep",))
    adapter = make_adapter(tmp_path / "adapter", packed, target_modules=["q_proj"])
    result = merge(packed, adapter, tmp_path / "out")
    assert set(result.methods.values()) == {None}
    name = "model.layers.0.self_attn.q_proj"
    before, after = (tensors_of(one)[f"{name}.weight"] for one in (packed, tmp_path / "out"))
    assert_equal(after, (before.float() + delta_of(adapter, packed, name)).to(before.dtype))


def test_a_global_scale_that_others_share_stays(adapter: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    quantkit.quantize(MODEL, packed, format="nvfp4")
    merge(packed, adapter, tmp_path / "out", check=False)
    before, after = tensors_of(packed), tensors_of(tmp_path / "out")
    scales = [name for name in before if name.endswith("q_proj.weight_global_scale")]
    assert len(scales) == 5 and all(torch.equal(before[name], after[name]) for name in scales)
    assert any(
        not torch.equal(before[name].view(torch.uint8), one.view(torch.uint8)) for name, one in after.items()
    )


def test_an_interrupted_merge_continues(
    packed: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = merge(packed, adapter, tmp_path / "whole")

    def full(*_: Any, **__: Any) -> None:
        raise OutputError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("quantkit.verification.check_output.run_prompt", full)
        with pytest.raises(OutputError, match="full"):
            merge(packed, adapter, tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
    for _ in range(2):
        result = merge(packed, adapter, tmp_path / "out", resume=True)
        assert result.relative_errors == expected.relative_errors
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def changed(adapter: Path, out: Path, **fields: Any) -> Path:
    """The adapter with other fields in its config."""
    shutil.copytree(adapter, out)
    path = out / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return out


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"use_dora": True}, "'use_dora' is True; only plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, r"'modules_to_save' is \['lm_head'\]; only plain LoRA"),
        ({"bias": "all"}, "'bias' is 'all'; only plain LoRA"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' is 'pissa', which changes the weights"),
        ({"peft_type": "IA3"}, "'peft_type' is 'IA3'; expected 'LORA'"),
        ({"r": 8}, "has rank 4, and adapter_config.json says 8"),
        ({"lora_alpha": "2"}, "'lora_alpha' is '2'; expected a number"),
        ({"rank_pattern": {"(a+)+b": 4}}, r"'rank_pattern' has the pattern '\(a\+\)\+b'"),
        ({"rank_pattern": [4]}, r"'rank_pattern' is \[4\]; expected an object"),
    ],
)
def test_other_adapters_are_refused(
    fields: Any, reason: str, packed: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=reason):
        merge(packed, changed(adapter, tmp_path / "adapter", **fields), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("layers.0.self_attn.q_proj", "layers.9.self_attn.q_proj", "is no linear of"),
        (
            "layers.0.self_attn.q_proj",
            "layers.0.self_attn.v_proj",
            r"are for \[64, 64\], and .* has \[32, 64\]",
        ),
        ("q_proj.lora_A.weight", "q_proj.lora_magnitude_vector", "is no factor of a linear"),
    ],
)
def test_the_adapter_of_another_model_is_refused(
    old: str, new: str, reason: str, packed: Path, adapter: Path, tmp_path: Path
) -> None:
    other = changed(adapter, tmp_path / "adapter")
    path = other / "adapter_model.safetensors"
    save_file({name.replace(old, new): one for name, one in load_file(path).items()}, path)
    with pytest.raises(CheckpointError, match=reason):
        merge(packed, other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_or_other_original_is_refused(packed: Path, adapter: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(MODEL, source)
    quantkit.quantize(source, tmp_path / "packed", format="int4")
    source.rename(tmp_path / "moved")
    with pytest.raises(
        UsageError, match=r"names .*source, which is not there; .* --source, or use --from-packed"
    ):
        merge(tmp_path / "packed", adapter, tmp_path / "out")
    weights = tensors_of(tmp_path / "moved")
    name = "model.layers.1.self_attn.q_proj.weight"
    weights[name] = weights[name].flip(0).contiguous()
    save_file(weights, tmp_path / "moved" / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"differ by .* of the sum of squares, and the manifest says 0\.00"
    ):
        merge(tmp_path / "packed", adapter, tmp_path / "out", source=tmp_path / "moved")
    with pytest.raises(QuantkitError, match="is no packed directory"):
        merge(MODEL, adapter, tmp_path / "out2")
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        merge(packed, MODEL, tmp_path / "out2")


def test_weights_that_scale_inputs_are_no_roundings_of_the_original(adapter: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    data = quantkit.quantizing.CalibrationOptions(str(EXAMPLES / "stories.txt"), samples=4, length=64)
    quantkit.quantize(MODEL, packed, format="int4", method="smoothquant", calibration=data)
    with pytest.raises(CheckpointError, match="other weights were rounded, as by methods that scale inputs"):
        merge(packed, adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merge(packed, adapter, tmp_path / "out", from_packed=True, check=False)


def test_a_text_that_cannot_be_scored_is_refused_before_any_work(
    packed: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(QuantkitError, match=r"none\.txt"):
        merge(packed, adapter, tmp_path / "out", text=tmp_path / "none.txt")
    monkeypatch.setattr("quantkit.eval.adapted.find_spec", lambda name: None)
    with pytest.raises(QuantkitError, match="takes PEFT, which is not installed"):
        merge(packed, adapter, tmp_path / "out", text=EXAMPLES / "stories.txt")
    assert not (tmp_path / "out").exists()

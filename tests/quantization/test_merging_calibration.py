"""Methods with data are repeated when an adapter is merged, on the inputs that the merged model has."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.adapters.repeat_methods import closest, rounded_modules
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.methods import METHODS
from quantkit.checkpoint.lora_adapter import LoraAdapter
from quantkit.checkpoint.manifest import read_manifest
from quantkit.errors import OutputError, UsageError
from quantkit.merging import MergeResult, merge
from quantkit.model.blocks import Block, Decoder
from quantkit.packing.schemes import scheme
from quantkit.targets.packed_source import StoredMatrix, open_packed

from ..support.compare import assert_equal
from ..tiny.calibrated import write
from .test_merging import EXAMPLES, MODEL, TARGETS, make_adapter, tensors_of

peft = pytest.importorskip("peft", reason="adapters are made by PEFT, of the extra 'test'")

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SAMPLES = {"samples": 6, "length": 64}


@pytest.fixture(autouse=True)
def small_products(one_thread: None, few_windows: None) -> None:
    """Also where no command runs."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An adapter of two kinds of linears, and one of all, trained beside int4."""
    work = tmp_path_factory.mktemp("adapters")
    quantkit.quantize(MODEL, work / "packed", format="int4")
    return {
        name: make_adapter(work / name, work / "packed", target_modules=targets)
        for name, targets in (("some", TARGETS), ("all", ALL))
    }


def data(text: Path = EXAMPLES / "stories.txt") -> CalibrationOptions:
    return CalibrationOptions(str(text), **SAMPLES)


def characters(text: Path) -> CalibrationOptions:
    """A text for tiny models whose tokens are characters."""
    text.write_text("".join(chr(33 + (i * i * 7 + i // 3) % 90) for i in range(64 * 40)))
    return CalibrationOptions(str(text), 6, 24)


def quantized(out: Path, method: str, text: Path = EXAMPLES / "stories.txt", **options: Any) -> Path:
    options = {"format": "int4", **options}
    quantkit.quantize(MODEL, out, method=method, calibration=data(text), check=False, **options)
    return out


@pytest.fixture(scope="module")
def packed_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """stories260K in int4 by a method, which no test changes."""
    work = tmp_path_factory.mktemp("by")
    return cache(lambda method: quantized(work / method, method))


def dense(out: Path, adapter: Path, kept: Path | None = None, source: Path = MODEL) -> Path:
    """`source` with `adapter` as float32; what it leaves alone is that of the packed directory `kept`."""
    shutil.copytree(source, out)
    lora = LoraAdapter.open(adapter)
    packed = None if kept is None else open_packed(kept)[0]
    weights = {}
    for name, one in tensors_of(source).items():
        module = name.removesuffix(".weight")
        weight = one.float()
        if module in lora.factors:
            weight = weight + lora.delta(module)
        elif packed is not None:
            weight = packed.read(name).float()
        weights[name] = weight.contiguous()
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    return out


def assert_same_tensors(first: Path, second: Path, names: set[str]) -> None:
    one, other = tensors_of(first), tensors_of(second)
    assert names and [name for name in names if not torch.equal(one[name], other[name])] == []


def touched(directory: Path, result: MergeResult) -> set[str]:
    return {name for name in tensors_of(directory) if name.rpartition(".")[0] in result.methods}


@pytest.mark.parametrize("method", ["imatrix", "gptq", "best", "signround"])
def test_an_adapter_of_all_linears_gives_the_bits_of_quantize(
    method: str,
    adapters: dict[str, Path],
    packed_by: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quantkit.quantization.blockwise.refine_block.STEPS", 8)
    packed = packed_by(method)
    result = merge(packed, adapters["all"], tmp_path / "out", check=False)
    assert set(result.methods.values()) == {method} and result.notes == ()
    source = dense(tmp_path / "dense", adapters["all"])
    quantkit.quantize(
        source, tmp_path / "expected", format="int4", method=method, calibration=data(), check=False
    )
    names = set(tensors_of(packed))
    assert_same_tensors(tmp_path / "out", tmp_path / "expected", names - {"model.embed_tokens.weight"})
    of_merged, expected = (read_manifest(tmp_path / name)["layers"] for name in ("out", "expected"))
    for module in result.methods:
        for key in ("method", "relative_error", "output_error", "damping", "block_error"):
            assert of_merged[module][key] == expected[module][key]


@pytest.mark.parametrize("method", ["imatrix", "gptq"])
def test_hessians_are_of_the_inputs_that_packed_linears_give(
    method: str, adapters: dict[str, Path], packed_by: Callable[[str], Path], tmp_path: Path
) -> None:
    packed = packed_by(method)
    result = merge(packed, adapters["some"], tmp_path / "out", check=False)
    assert set(result.methods.values()) == {method}
    changed = touched(packed, result)
    assert_same_tensors(packed, tmp_path / "out", set(tensors_of(packed)) - changed)
    source = dense(tmp_path / "dense", adapters["some"], packed)
    rules = (*(f"*.{name}=int4::{method}" for name in TARGETS), "*=keep")
    quantkit.quantize(source, tmp_path / "expected", rules=rules, calibration=data())
    assert_same_tensors(tmp_path / "out", tmp_path / "expected", changed)
    # Other methods give other bits.
    plain = tmp_path / "mse"
    quantkit.quantize(MODEL, plain, format="int4", check=False)
    merge(plain, adapters["some"], tmp_path / "of-mse", check=False)
    words = {name for name in changed if name.endswith("_packed")}
    one, other = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "of-mse")
    assert not any(torch.equal(one[name], other[name]) for name in words)


def test_a_dense_linear_runs_with_its_adapter(adapters: dict[str, Path], tmp_path: Path) -> None:
    packed = quantized(tmp_path / "packed", "gptq", rules=("*.q_proj=keep",))
    result = merge(packed, adapters["some"], tmp_path / "out", check=False)
    assert set(result.methods.values()) == {"gptq", None}
    source = dense(tmp_path / "dense", adapters["some"], packed)
    rules = ("*.down_proj=int4::gptq", "*=keep")
    quantkit.quantize(source, tmp_path / "expected", rules=rules, calibration=data())
    assert_same_tensors(tmp_path / "out", tmp_path / "expected", touched(packed, result))


def test_the_original_with_the_adapter_is_what_input_errors_are_of(
    adapters: dict[str, Path],
    packed_by: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = packed_by("best")
    lent: list[tuple[str, set[str]]] = []
    loaded = Decoder.loaded

    def noted(decoder: Decoder, block: Block, overrides: Any = None) -> Any:
        lent.append((block.name, set(overrides or ())))
        return loaded(decoder, block, overrides)

    monkeypatch.setattr(Decoder, "loaded", noted)
    merge(packed, adapters["some"], tmp_path / "out", check=False)
    stays = {"input_layernorm.weight", "post_attention_layernorm.weight"} | {
        *(f"self_attn.{one}_proj.weight" for one in "kvo"),
        *(f"mlp.{one}_proj.weight" for one in ("gate", "up")),
    }
    blocks = [f"model.layers.{at}" for at in range(5)]
    assert lent == [one for name in blocks for one in ((name, stays), (name, set()))]


def test_best_beats_mse_on_its_own_inputs_and_leaves_the_rest(
    adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quantkit.eval.adapted.MOST_WINDOWS", 8)
    text = tmp_path / "gone.txt"
    shutil.copy(EXAMPLES / "stories.txt", text)
    packed = quantized(tmp_path / "packed", "best", text)
    result = merge(packed, adapters["some"], tmp_path / "out", text=EXAMPLES / "stories.txt")
    assert set(result.methods.values()) == {"best"}
    assert_same_tensors(packed, tmp_path / "out", set(tensors_of(packed)) - touched(packed, result))
    text.unlink()
    plain = merge(packed, adapters["some"], tmp_path / "out2", text=EXAMPLES / "stories.txt")
    assert set(plain.methods.values()) == {"mse"}
    assert result.after is not None and plain.after is not None
    assert result.after.kl_mean is not None and plain.after.kl_mean is not None
    assert result.after.kl_mean < plain.after.kl_mean


def test_data_that_is_gone_is_said_and_may_be_named(adapters: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(EXAMPLES / "stories.txt", text)
    packed = quantized(tmp_path / "packed", "gptq", text)
    merge(packed, adapters["some"], tmp_path / "expected", check=False)
    text.rename(tmp_path / "moved.txt")
    result = merge(packed, adapters["some"], tmp_path / "out", check=False)
    assert result.notes == (
        "model.layers.0.mlp.down_proj and 9 more: rounded by mse now, not by gptq, whose data cannot be read "
        f"again (calibration file {text} is not there. Check the path); --calibration names other texts",
    )
    # Number and length of samples are those of the manifest.
    again = merge(
        packed, adapters["some"], tmp_path / "again", calibration=tmp_path / "moved.txt", check=False
    )
    assert again.notes == () and set(again.methods.values()) == {"gptq"}
    assert_same_tensors(tmp_path / "again", tmp_path / "expected", set(tensors_of(packed)))
    text.write_text("Once more, another story. " * 400)
    changed = merge(packed, adapters["some"], tmp_path / "changed", check=False)
    assert changed.notes == (
        "model.layers.0.mlp.down_proj and 9 more: rounded by mse now, not by gptq, whose data "
        f"({text}:6) is no longer the same; --calibration names other texts",
    )
    with pytest.raises(UsageError, match=r"calibration file .*none\.txt is not there"):
        merge(packed, adapters["some"], tmp_path / "none", calibration=tmp_path / "none.txt")
    assert not (tmp_path / "none").exists()


def test_the_bundled_text_is_read_again(adapters: dict[str, Path], tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    options = CalibrationOptions(None, 4, 64, seed=3)
    quantkit.quantize(MODEL, packed, format="int4", method="gptq", calibration=options, check=False)
    result = merge(packed, adapters["some"], tmp_path / "out", check=False)
    assert set(result.methods.values()) == {"gptq"}
    assert [note for note in result.notes if "mse" in note] == []
    before, after = (read_manifest(one) for one in (packed, tmp_path / "out"))
    assert after["merge"]["calibration"] == before["calibration"] and after["seed"] == 3


def test_texts_without_a_method_that_takes_them_are_refused(
    adapters: dict[str, Path], tmp_path: Path
) -> None:
    quantkit.quantize(MODEL, tmp_path / "packed", format="int4", check=False)
    with pytest.raises(UsageError, match=r"no linear that the adapter changes was rounded by a method that"):
        merge(
            tmp_path / "packed",
            adapters["some"],
            tmp_path / "out",
            calibration=EXAMPLES / "stories.txt",
        )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stored", "expected", "why"),
    [
        ("gptq", "gptq", None),
        ("distill", "best", "which trains all weights of a model together"),
        ("mse,distill", "mse", "which trains all weights of a model together"),
        ("awq", "gptq", "which scales inputs by tensors that stay as they are"),
        ("awq,gptq", "gptq", "which scales inputs by tensors that stay as they are"),
        ("smoothquant", "imatrix", "which scales inputs by tensors that stay as they are"),
        ("later", None, "which this quantkit does not have"),
    ],
)
def test_methods_that_change_other_tensors_have_one_next_to_them(
    stored: str, expected: str | None, why: str | None
) -> None:
    found = closest(stored, scheme("int4"))
    assert found == (None if expected is None else METHODS[expected], why)


def test_methods_that_scale_inputs_are_replaced_and_said(adapters: dict[str, Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    shutil.copy(EXAMPLES / "stories.txt", text)
    packed = quantized(tmp_path / "packed", "smoothquant", text)
    result = merge(packed, adapters["some"], tmp_path / "out", from_packed=True, check=False)
    assert result.notes == (
        "model.layers.0.mlp.down_proj and 9 more: rounded by imatrix now, not by smoothquant, which scales "
        "inputs by tensors that stay as they are",
    )
    text.unlink()
    result = merge(packed, adapters["some"], tmp_path / "out2", from_packed=True, check=False)
    assert result.notes == (
        "model.layers.0.mlp.down_proj and 9 more: rounded by mse now, not by smoothquant, which scales "
        "inputs by tensors that stay as they are, and whose data cannot be read again (calibration file "
        f"{text} is not there. Check the path); --calibration names other texts",
    )


@pytest.mark.parametrize("source", [None, "packed"])
def test_kl_is_that_of_the_models_of_transformers(
    source: str | None, adapters: dict[str, Path], packed_by: Callable[[str], Path], tmp_path: Path
) -> None:
    packed = packed_by("gptq")
    adapter, text = adapters["some"], EXAMPLES / "stories.txt"
    from_packed = source is not None
    result = merge(packed, adapter, tmp_path / "out", text=text, from_packed=from_packed)
    if from_packed:
        assert result.text is not None and (result.before, result.after) == (None, None)
        return
    assert result.before is not None and result.after is not None
    original = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(original, adapter).eval()
    beside = peft.PeftModel.from_pretrained(quantkit.load(packed, dtype="float32"), adapter).eval()
    merged = quantkit.load(tmp_path / "out", dtype="float32")
    from quantkit.eval.adapted import read_windows

    windows = read_windows(packed, text)
    for metrics, model in ((result.before, beside), (result.after, merged)):
        total = 0.0
        for tokens in windows.tokens.split(1):
            with torch.inference_mode():
                p, q = (one(input_ids=tokens).logits.double().log_softmax(-1) for one in (expected, model))
            total += float((p.exp() * (p - q)).sum(-1)[0, -windows.scored - 1 : -1].mean())
        assert metrics.kl_mean == pytest.approx(total / len(windows.tokens), rel=1e-4)
    assert "KL 0." in repr(result) and " before, 0." in repr(result)


def test_kl_is_measured_without_a_text_unless_nothing_is_checked(
    adapters: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantkit.quantize(MODEL, tmp_path / "packed", format="int4", check=False)
    result = merge(tmp_path / "packed", adapters["some"], tmp_path / "out")
    assert result.before is not None and result.after is not None and result.after.windows == 2
    unchecked = merge(tmp_path / "packed", adapters["some"], tmp_path / "out2", check=False)
    assert (unchecked.before, unchecked.after, unchecked.text, unchecked.notes) == (None, None, None, ())
    with monkeypatch.context() as patch:
        patch.setattr("quantkit.merging.free_memory", lambda _: 1 << 10)
        short = merge(tmp_path / "packed", adapters["some"], tmp_path / "out3")
    assert short.text is None and short.notes[-1].startswith("KL was not measured: that takes about ")
    monkeypatch.setattr("quantkit.eval.adapted.find_spec", lambda name: None)
    without = merge(tmp_path / "packed", adapters["some"], tmp_path / "out4")
    assert without.text is None
    assert without.notes[-1].startswith("KL was not measured: comparing with the adapter takes PEFT")


def test_an_interrupted_calibration_continues(
    adapters: dict[str, Path], packed_by: Callable[[str], Path], tmp_path: Path
) -> None:
    packed, adapter = packed_by("best"), adapters["some"]
    merge(packed, adapter, tmp_path / "whole", check=False)

    def fail(done: int, whole: int, tensor: str) -> None:
        if tensor.startswith("model.layers.3"):
            raise OutputError("the disk is full")

    with pytest.raises(OutputError, match="full"):
        merge(packed, adapter, tmp_path / "out", check=False, progress=fail)
    assert sorted(path.name for path in (tmp_path / "out").glob("calibrated-*")) == [
        f"calibrated-0000{at}.safetensors" for at in range(3)
    ]
    with pytest.raises(OutputError, match=r"calibration"):
        merge(packed, adapter, tmp_path / "out", resume=True, calibration=f"{EXAMPLES / 'stories.txt'}:5")
    merge(packed, adapter, tmp_path / "out", check=False, resume=True)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in (tmp_path / "whole").iterdir()
    )
    assert_same_tensors(tmp_path / "out", tmp_path / "whole", set(tensors_of(packed)))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("best", {"format": "nvfp4"}),
        ("gptq", {"scheme": "W8A8"}),
        ("best", {"scheme": "FP8"}),
        ("gptq", {"scheme": "NVFP4", "rules": ("*.down_proj=keep",)}),
        ("gptq", {"format": "int4", "rules": ("*.q_proj=keep",)}),
        ("gptq", {"format": "int4", "rotate": True}),
        ("gptq", {"format": "int4", "embeddings": "int8"}),
        ("best", {"format": "int3", "zero_point": "integer", "packing": "stream"}),
    ],
)
def test_schemes_are_kept(method: str, options: Any, adapters: dict[str, Path], tmp_path: Path) -> None:
    scheme_of = {key: value for key, value in options.items() if key in ("format", "scheme")}
    rest = {key: value for key, value in options.items() if key not in scheme_of}
    packed = tmp_path / "packed"
    quantkit.quantize(MODEL, packed, method=method, calibration=data(), check=False, **scheme_of, **rest)
    # One of another basis means nothing to rotated weights.
    rotated = "rotate" in options
    adapter = make_adapter(tmp_path / "adapter", packed) if rotated else adapters["some"]
    result = merge(packed, adapter, tmp_path / "out", text=EXAMPLES / "stories.txt")
    kept = [rule.removeprefix("*.").removesuffix("=keep") for rule in options.get("rules", ())]
    unpacked = {name for name in result.methods if name.rpartition(".")[2] in kept}
    assert {name for name, one in result.methods.items() if one != method} == unpacked
    before, after = tensors_of(packed), tensors_of(tmp_path / "out")
    assert {name: (one.dtype, one.shape) for name, one in before.items()} == {
        name: (one.dtype, one.shape) for name, one in after.items()
    }
    same = {name for name in before if name.rpartition(".")[0] not in result.methods}
    same |= {name for name in before if name.endswith(("_global_scale", "input_scale", "_shape"))}
    assert [name for name in same if not torch.equal(before[name], after[name])] == []
    assert result.before is not None and result.after is not None
    assert result.before.kl_mean is not None and result.after.kl_mean is not None
    assert result.after.kl_mean < 1.5 * result.before.kl_mean


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe"])
def test_experts_and_heads_run_as_they_are_packed(family: str, tmp_path: Path) -> None:
    source = write(tmp_path, family, torch.float32)
    packed, options = tmp_path / "packed", characters(tmp_path / "text.txt")
    quantkit.quantize(
        source, packed, format="int4", group_size=32, method="gptq", lm_head="int8", calibration=options
    )
    targets = ["q_proj", "o_proj", "lm_head"]
    ids = torch.arange(90, 30, -1)[None]
    adapter = make_adapter(tmp_path / "adapter", packed, ids, target_modules=targets)
    result = merge(packed, adapter, tmp_path / "out", check=False)
    assert set(result.methods.values()) == {"gptq"} and len(result.methods) == 3 * 2 + 1
    changed = touched(packed, result)
    assert_same_tensors(packed, tmp_path / "out", set(tensors_of(packed)) - changed)
    made = dense(tmp_path / "dense", adapter, packed, source)
    rules = ("*.q_proj=int4:32:gptq", "*.o_proj=int4:32:gptq", "lm_head=int8::gptq", "*=keep")
    quantkit.quantize(made, tmp_path / "expected", rules=rules, calibration=options)
    views = [open_packed(tmp_path / name)[0] for name in ("out", "expected")]
    for module in result.methods:
        one, other = (view.tensors[f"{module}.weight"] for view in views)
        assert isinstance(one, StoredMatrix) and isinstance(other, StoredMatrix)
        parts = [
            matrix.packed(view.read_stored, 0, matrix.shape[0])
            for matrix, view in zip((one, other), views, strict=True)
        ]
        assert_equal((parts[0].words, parts[0].scale), (parts[1].words, parts[1].scale))


def test_experts_round_their_inputs_while_others_are_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, "mixtral", torch.float32)
    packed, options = tmp_path / "packed", characters(tmp_path / "text.txt")
    quantkit.quantize(source, packed, scheme="FP8", method="gptq", calibration=options)
    adapter = make_adapter(
        tmp_path / "adapter", packed, torch.arange(90, 30, -1)[None], target_modules=["q_proj"]
    )
    expected = merge(packed, adapter, tmp_path / "out", check=False)
    assert set(expected.methods.values()) == {"gptq"}
    found: dict[str, Any] = {}

    def unrounded(*given: Any) -> dict[str, Any]:
        found.update(rounded_modules(*given))
        return {}

    monkeypatch.setattr("quantkit.adapters.repeat_methods.rounded_modules", unrounded)
    merge(packed, adapter, tmp_path / "out2", check=False)
    assert {name.partition("layers.0.")[2] for name in found if "layers.0." in name} == {
        *(f"self_attn.{one}_proj" for one in "qkvo"),
        "mlp.experts",
    }
    assert all(one.static and one.stored is not None for one in found.values())
    one, other = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "out2")
    name = "model.layers.{}.self_attn.q_proj.weight"
    assert not torch.equal(one[name.format(2)], other[name.format(2)])

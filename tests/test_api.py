"""The functions of `quantkit` as a script or a notebook calls them."""

import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantkit
from quantkit.errors import FormatError, QuantkitError, UsageError
from quantkit.packing.formats import number_format
from quantkit.packing.schemes import scheme
from quantkit.progress_bar import reporting
from quantkit.quantization.plan import Plan
from quantkit.recipes.recipe import Choice, Recipe, Rule

from .support.compare import assert_equal

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "stories260K"
TEXT = ROOT / "examples" / "stories.txt"
TEXTS = [TEXT.read_text(encoding="utf-8")[start : start + 2000] for start in range(0, 40_000, 2000)]
FEW: dict[str, Any] = {"calibration_samples": 4, "calibration_length": 64}
IDS = torch.arange(20, 60)[None]


@pytest.fixture(autouse=True)
def small_products(one_thread: None) -> None:
    """Also where no command runs."""


def same(first: Path, second: Path) -> None:
    one, other = (load_file(path / "model.safetensors") for path in (first, second))
    assert_equal(*({name: part.view(torch.uint8) for name, part in of.items()} for of in (one, other)))


def test_dir_shows_the_api_alone() -> None:
    assert dir(quantkit) == sorted(quantkit.__all__)
    code = "import quantkit; print(*[name for name in quantkit.__all__ if getattr(quantkit, name) is None])"
    code += "; print(*[n for n in dir(quantkit) if type(getattr(quantkit, n)).__name__ == 'module'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    # A module of the name of a function would hide it.
    assert done.stdout.split() == []
    assert all(inspect.getdoc(getattr(quantkit, name)) for name in quantkit.__all__ if name != "__version__")


@pytest.mark.slow
def test_a_loaded_model_has_the_types_of_transformers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import quantkit\n"
        "model = quantkit.load('DIR')\n"
        "model.generate(max_new_tokens=3)\n"
        "model.save_pretrained('OUT')\n"
        "bits: float | None = quantkit.plan('DIR', format='int4').bits_per_weight['linears']\n"
        "quantkit.quantize('DIR', 'OUT', fromat='int4')\n"
    )
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", "--ignore-missing-imports", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert "Unexpected keyword argument" in done.stdout and "Found 1 error" in done.stdout, done.stdout


@pytest.mark.parametrize("function", [quantkit.quantize, quantkit.plan, quantkit.quantize_model])
def test_signatures_name_every_option(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert {"format", "bits_per_weight", "calibration", "scheme", "rules", "device"} <= parameters.keys()
    assert parameters["device"].default == "auto" and parameters["group_size"].annotation == "GroupSize"


@pytest.mark.parametrize("function", [quantkit.evaluate, quantkit.merge, quantkit.load, quantkit.convert])
def test_docstrings_explain_every_parameter_and_error(function: Any) -> None:
    """Options that many functions take are explained by the records that the docstring names."""
    shared = {"source", "out", "options", "resume", "overwrite", "check", "device"}
    names = [name for name, one in inspect.signature(function).parameters.items() if one.default is not None]
    text = inspect.getdoc(function) or ""
    assert [name for name in names if f"`{name}" not in text and name not in shared] == []
    assert re.search(r"Raises\s+`", text)


def test_the_example_of_evaluate_runs(tmp_path: Path) -> None:
    text = tmp_path / "wiki.txt"
    text.write_text("Once upon a time there was a little girl. " * 20)
    report = quantkit.evaluate(MODEL, against=MODEL, texts=[text], window=64, max_windows=1, progress=False)
    assert report.texts["wiki.txt"].kl_mean == 0 and report.texts["wiki.txt"].perplexity > 1
    assert report.sizes.linears is None and report.sizes.model == 32
    assert 'texts["wiki.txt"].kl_mean' in (quantkit.evaluate.__doc__ or "")


def test_an_unknown_option_is_a_type_error_with_the_nearest_name() -> None:
    text = r"unexpected keyword argument 'fromat'\. Did you mean 'format'\?"
    for call in (
        lambda: quantkit.quantize(MODEL, "out", fromat="int4"),
        lambda: quantkit.plan(MODEL, fromat="int4"),
        lambda: quantkit.QuantkitConfig(fromat="int4"),
    ):
        with pytest.raises(TypeError, match=text):
            call()


def test_a_plan_is_what_quantize_writes(tmp_path: Path) -> None:
    planned = quantkit.plan(MODEL, format="int4", rules=["*.down_proj=int8"])
    assert isinstance(planned, Plan)
    result = quantkit.quantize(MODEL, tmp_path / "out", format="int4", rules=["*.down_proj=int8"])
    assert result.plan.output_bytes == planned.output_bytes
    assert repr(planned) == "Plan(35 of 36 linears packed, 5.203 bits per weight, 1.04 MB to 281.25 kB)"
    assert repr(result) == f"QuantizeResult('{tmp_path}/out', {planned!r})"


def test_reprs_take_a_line(tmp_path: Path) -> None:
    packed = quantkit.quantize_tensor(torch.ones(8, 64), "int4")
    assert repr(packed) == "PackedTensor((8, 64), 'int4 channel bfloat16', 4.5 bits per weight, 'cpu')"
    assert repr(packed.scheme) == "Scheme('int4 channel bfloat16')"
    assert repr(quantkit.QuantkitConfig(format="int4", group_size=32)) == (
        "QuantkitConfig(format='int4', group_size=32)"
    )
    quantkit.quantize(MODEL, tmp_path / "out", format="int4")
    layer = quantkit.load(tmp_path / "out").model.layers[0].mlp.up_proj
    assert repr(layer) == (
        "PackedLinear(in_features=64, out_features=172, bias=False, scheme=int4 channel bfloat16)"
    )
    report = quantkit.evaluate(tmp_path / "out", texts=[TEXT], window=64, max_windows=2)
    assert (
        repr(report)
        == f"EvalReport('out', stories.txt: {report.texts['stories.txt'].nll:.4g} nats per token)"
    )


@pytest.mark.parametrize("kind", ["a path", "texts", "rows", "a data set"])
def test_calibration_is_a_path_texts_or_a_data_set(kind: str, tmp_path: Path) -> None:
    given: Any = {"a path": TEXT, "texts": TEXTS, "rows": ({"text": text} for text in TEXTS)}.get(kind)
    if given is None:
        given = pytest.importorskip("datasets").Dataset.from_dict({"text": TEXTS})
    result = quantkit.quantize(MODEL, tmp_path / "out", method="gptq", calibration=given, **FEW)
    assert all(one.output_error is not None for one in result.measured.values())
    manifest = (tmp_path / "out" / "quantkit_manifest.json").read_text()
    assert ("20 texts given in Python, sha256 " in manifest) is (kind != "a path")


def test_texts_in_memory_give_the_bytes_of_the_same_texts_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXTS[0] + TEXTS[1])
    quantkit.quantize(MODEL, tmp_path / "one", method="gptq", calibration=file, **FEW)
    quantkit.quantize(MODEL, tmp_path / "two", method="gptq", calibration=[TEXTS[0] + TEXTS[1]], **FEW)
    same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"calibration": [str(TEXT)], "method": "gptq"}, "item 0 of the calibration data is the file"),
        ({"calibration": [3], "method": "gptq"}, "item 0 of the calibration data has messages = 3"),
        ({"calibration": TEXTS}, "no method of the recipe takes any"),
        ({"formats": ["int4"]}, "formats are what bits_per_weight chooses from"),
        ({"bits_per_weight": 4.5, "format": "int4"}, "--bits-per-weight chooses the formats"),
        (
            {"scheme": scheme("int4"), "group_size": 32},
            r"a Scheme \(int4 g128 .*\) says the group-size",
        ),
        ({"scheme": scheme("int4"), "rules": ["*.q_proj=int9"]}, "unknown format 'int9'"),
        ({"recipe": Recipe(), "format": "int4"}, "a Recipe says all about format and rules"),
    ],
)
def test_refusals(given: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(QuantkitError, match=reason):
        quantkit.quantize(MODEL, tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


def test_bits_per_weight_chooses_formats(tmp_path: Path) -> None:
    result = quantkit.quantize(MODEL, tmp_path / "out", bits_per_weight=4.6, calibration=TEXTS, **FEW)
    bits = result.plan.bits_per_weight["linears"]
    assert bits is not None and 4.4 < bits <= 4.6
    planned = quantkit.plan(MODEL, bits_per_weight=4.6, calibration=TEXTS, **FEW)
    assert planned.output_bytes == result.plan.output_bytes


def test_a_scheme_quantizes_a_whole_model(tmp_path: Path) -> None:
    own = quantkit.Scheme(number_format("int5"), 16, "integer", torch.float32)
    result = quantkit.quantize(MODEL, tmp_path / "out", scheme=own, rules=["*.down_proj=int8"])
    model = quantkit.load(tmp_path / "out")
    assert model.model.layers[1].mlp.up_proj.scheme == own
    assert model.model.layers[1].mlp.down_proj.scheme.format.name == "int8"
    manifest = quantkit.plan(MODEL, recipe=Recipe.from_dict(_recipe(tmp_path / "out")))
    assert manifest.output_bytes == result.plan.output_bytes
    # The same in a recipe, for some linears.
    rules = (Rule("*.q_proj", Choice(exact=own)),)
    planned = quantkit.plan(MODEL, recipe=Recipe(Choice("int8"), rules))
    found = {layer.linear.module.rpartition(".")[2]: layer.scheme for layer in planned.layers if layer.scheme}
    assert found["q_proj"] == own and found["k_proj"].format.name == "int8"


def _recipe(directory: Path) -> Any:
    from quantkit.checkpoint.manifest import read_manifest

    return read_manifest(directory)["recipe"]


@pytest.mark.parametrize(
    "given", [{"format": "int4"}, {"format": "nf4", "embeddings": "int8"}, {"scheme": "W8A8"}]
)
def test_models_in_memory_become_what_quantize_writes(given: Any, tmp_path: Path) -> None:
    quantkit.quantize(MODEL, tmp_path / "out", **given)
    expected = quantkit.load(tmp_path / "out", dtype="float32")(input_ids=IDS).logits
    dense = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    before = dense(input_ids=IDS).logits
    model = quantkit.quantize_model(dense, **given)
    assert_equal(model(input_ids=IDS).logits, expected)
    assert_equal(dense(input_ids=IDS).logits, before)
    assert model.generate(input_ids=IDS, max_new_tokens=3).shape == (1, 43)
    config = quantkit.QuantkitConfig(**given)
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=config, dtype=torch.float32)
    assert_equal(loaded(input_ids=IDS).logits, expected)
    for one in (model, loaded):
        one.save_pretrained(tmp_path / "saved")
        assert_equal(quantkit.load(tmp_path / "saved", dtype="float32")(input_ids=IDS).logits, expected)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
        assert_equal(again(input_ids=IDS).logits, expected)
    assert torch.get_default_dtype() == torch.float32


def test_models_in_memory_take_methods_with_data(tmp_path: Path) -> None:
    given = {"method": "gptq", "calibration": TEXTS, **FEW}
    quantkit.quantize(MODEL, tmp_path / "out", **given)
    expected = quantkit.load(tmp_path / "out")(input_ids=IDS).logits
    dense = AutoModelForCausalLM.from_pretrained(MODEL)
    with pytest.raises(UsageError, match="calibration texts take the model's tokenizer: give it"):
        quantkit.quantize_model(dense, **given)
    model = quantkit.quantize_model(dense, tokenizer=AutoTokenizer.from_pretrained(MODEL), **given)
    assert_equal(model(input_ids=IDS).logits, expected)
    config = quantkit.QuantkitConfig(**given)
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=config, dtype=torch.bfloat16)
    packed = quantkit.load(tmp_path / "out", dtype="bfloat16")
    assert_equal(loaded(input_ids=IDS).logits, packed(input_ids=IDS).logits)


def test_models_in_memory_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch makes its cache in the temporary directory, once per process.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path.with_name("inductor")))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = quantkit.QuantkitConfig(format="int4")
    model = AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=config)
    assert len(list(tmp_path.iterdir())) == 1
    quantkit.quantize_model(AutoModelForCausalLM.from_pretrained(MODEL), format="int4")
    assert len(list(tmp_path.iterdir())) == 1
    del model
    assert list(tmp_path.iterdir()) == []


def test_models_that_cannot_be_quantized_are_refused(tmp_path: Path) -> None:
    quantkit.quantize(MODEL, tmp_path / "out", format="int4")
    packed = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with pytest.raises(UsageError, match=r"q_proj' is packed already\. Quantize the original model"):
        quantkit.quantize_model(packed)
    with pytest.raises(UsageError, match="takes a model of transformers, not a Linear"):
        quantkit.quantize_model(torch.nn.Linear(3, 3))
    with pytest.raises(UsageError, match=r"is of a packed checkpoint, and the one to load is dense\. Give"):
        AutoModelForCausalLM.from_pretrained(MODEL, quantization_config=packed.config.quantization_config)
    with pytest.raises(FormatError, match="unknown format 'int9'"):
        AutoModelForCausalLM.from_pretrained(
            MODEL, quantization_config=quantkit.QuantkitConfig(format="int9")
        )


def test_progress_is_shown_to_terminals_and_notebooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int, str]] = []
    with reporting(lambda *call: calls.append(call), "working") as report:
        assert report is not None
        report(1, 2, "x")
    assert calls == [(1, 2, "x")]
    for asked in (None, True, False):
        with reporting(asked, "working") as report:
            assert report is None
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    for asked, shown in ((None, True), (True, True), (False, False)):
        with reporting(asked, "working") as report:
            assert (report is not None) is shown


def test_progress_in_a_terminal(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with reporting(None, "working") as report:
        assert report is not None and capfd.readouterr().err == ""
        report(1, 2, "layers.0")
    assert "working" in capfd.readouterr().err

"""Evaluation from files to figures, on a small real model and hand-made headers."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, EnvironmentProblem, OutputError, UsageError
from quantkit.eval import models, runner
from quantkit.eval.eval_model import Batch
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.evaluate import evaluate, evaluate_many
from quantkit.eval.reference import Reference, plan_blocks
from quantkit.eval.result_cache import Partial
from quantkit.eval.sizes import measure
from quantkit.eval.tasks import Tasks
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.quantizing import quantize

ROOT = Path(__file__).parents[2]
STORIES = [ROOT / "examples" / "stories260K", ROOT.parent / "shared" / "models" / "stories260K"]
BOOKS = ROOT.parent / "shared" / "models" / "books-28m"
TEXTS = ROOT.parent / "shared" / "data" / "eval"

STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play in the park with her dog. "
    "One day, she found a big red ball under a tree. She was very happy and showed it to her mom. "
)
REQUIRED = {
    "perplexity",
    "reference_perplexity",
    "excess",
    "kl_mean",
    "kl_p99",
    "same_top1",
    "tokens",
}


@pytest.fixture(scope="session")
def stories() -> Path:
    for path in STORIES:
        if path.is_dir():
            return path
    pytest.skip("stories260K is not here")


@pytest.fixture(scope="session")
def perturbed(stories, tmp_path_factory) -> Path:
    """A copy of stories260K whose linears are a few percent off."""
    directory = tmp_path_factory.mktemp("models") / "perturbed"
    shutil.copytree(stories, directory)
    path = directory / "model.safetensors"
    path.unlink()
    tensors = load_file(stories / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.1 * float(tensor.std()))
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> list[Path]:
    directory = tmp_path_factory.mktemp("texts")
    paths = [directory / "a.txt", directory / "b.txt"]
    paths[0].write_text(5 * STORY)
    paths[1].write_text(3 * STORY.replace("Lily", "Tom"))
    return paths


def figures(report) -> dict:
    return {name: metrics.to_dict() for name, metrics in report.texts.items()}


def test_a_model_against_itself_loses_nothing(stories, texts):
    report = evaluate(stories, against=stories, texts=texts, window=64, max_windows=3, device="cpu")
    for metrics in report.texts.values():
        assert metrics.kl_mean == metrics.kl_max == metrics.excess == metrics.excess_se == 0.0
        assert metrics.same_top1 == 1.0
        assert metrics.perplexity == metrics.reference_perplexity
        assert metrics.tokens == 3 * 63


def test_figures_are_those_of_the_whole_logits_in_float64(stories, perturbed, texts):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report = evaluate(perturbed, against=stories, texts=texts[:1], window=64, device="cpu")
    found = report.texts["a.txt"]
    ids = AutoTokenizer.from_pretrained(stories)(texts[0].read_text(), add_special_tokens=False)["input_ids"]
    windows = torch.tensor(ids)[: len(ids) // 64 * 64].view(-1, 64)
    logs = []
    for path in (perturbed, stories):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            logs.append(model(windows).logits[:, :-1].double().log_softmax(-1))
    q, p = logs
    kl = (p.exp() * (p - q)).sum(-1)
    nll, reference_nll = (-log.gather(-1, windows[:, 1:, None]).mean() for log in (q, p))
    assert found.tokens == kl.numel() == len(windows) * 63
    assert found.perplexity == pytest.approx(nll.exp().item(), rel=1e-5)
    assert found.reference_perplexity == pytest.approx(reference_nll.exp().item(), rel=1e-5)
    assert found.excess == pytest.approx(math.log(found.perplexity / found.reference_perplexity), abs=1e-9)
    assert found.kl_mean == pytest.approx(kl.mean().item(), abs=1e-5, rel=0)
    for name, at in (("median", 0.5), ("p95", 0.95), ("p99", 0.99)):
        expected = kl.flatten().quantile(at).item()
        assert getattr(found, f"kl_{name}") == pytest.approx(expected, abs=1e-5, rel=0)
    assert found.same_top1 == pytest.approx((q.argmax(-1) == p.argmax(-1)).double().mean().item(), abs=1e-3)
    assert 0.0 < found.kl_mean < 1.0 and found.same_top1 < 1.0


def counted(monkeypatch) -> list[Path]:
    """The models opened from here on, in order."""
    opened: list[Path] = []
    original = runner.load_language_model

    def load(path, **options):
        opened.append(Path(path))
        return original(path, **options)

    monkeypatch.setattr(runner, "load_language_model", load)
    return opened


def test_models_that_do_not_fit_run_block_by_block_to_the_same_bits(stories, perturbed, texts, monkeypatch):
    options = {"against": stories, "texts": texts, "window": 32, "device": "cpu", "batch": 2, "stride": 20}
    whole = evaluate(perturbed, **options, noise_floor=True)
    monkeypatch.setattr(runner, "free_memory", lambda device: 100_000)
    monkeypatch.setattr(
        runner, "load_language_model", lambda *_, **__: pytest.fail("a whole model was loaded")
    )
    monkeypatch.setattr(runner, "WAITING_TOKENS", 200)
    by_block = evaluate(perturbed, **options, noise_floor=True)
    assert by_block.texts == whole.texts and by_block.noise_floor.texts == whole.noise_floor.texts
    assert whole.notes == by_block.notes[:-2]
    assert by_block.notes[-2:] == tuple(
        f"{name} takes 1.04 MB in float32 and 100.00 kB are free on cpu: it ran block by block, which "
        "reads its weights once for every 200 tokens"
        for name in (perturbed.name, stories.name)
    )


@pytest.mark.parametrize("batch", [1, 2])
def test_taking_turns_gives_exactly_the_figures_of_one_pass(stories, perturbed, texts, batch, monkeypatch):
    options = {"against": stories, "texts": texts, "window": 32, "device": "cpu", "batch": batch}
    options["max_windows"] = 3
    whole = evaluate_many([perturbed], EvalOptions(**options))[0]
    opened = counted(monkeypatch)
    window_bytes = 31 * 512 * 4
    in_turns = evaluate_many([perturbed], EvalOptions(budget_bytes=3 * window_bytes, **options))[0]
    assert figures(in_turns) == figures(whole)
    assert len(opened) >= 4, opened
    assert opened == [stories, perturbed] * (len(opened) // 2)


def test_a_stride_scores_tokens_with_context(stories, perturbed, texts):
    options = {"against": stories, "texts": texts[:1], "device": "cpu"}
    found = evaluate(perturbed, window=64, stride=16, max_windows=9, **options).texts["a.txt"]
    assert (found.tokens, found.windows) == (9 * 16, 9)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(stories)(texts[0].read_text(), add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(perturbed, dtype=torch.float32).eval()
    losses = []
    for start in range(0, 9 * 16, 16):
        window = torch.tensor([ids[start : start + 64]])
        with torch.no_grad():
            log = model(window).logits[0].double().log_softmax(-1)
        losses += [-log[at - 1, window[0, at]].item() for at in range(48, 64)]
    assert found.nll == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_the_noise_floor_is_the_reference_in_another_dtype(stories, perturbed, texts):
    options = {"texts": texts, "window": 64, "max_windows": 2, "device": "cpu"}
    found = evaluate(perturbed, against=stories, noise_floor=True, **options)
    floor = found.noise_floor
    assert floor is not None and floor.dtype == "bfloat16"
    for name, metrics in floor.texts.items():
        assert 0 < metrics.kl_mean < 0.01 < found.texts[name].kl_mean
        assert metrics.reference_perplexity == found.texts[name].reference_perplexity
    assert found.to_dict()["noise_floor"]["texts"]["a.txt"]["tokens"] == 126
    assert evaluate(stories, against=stories, **options).noise_floor is None
    with pytest.raises(UsageError, match="those against a reference"):
        evaluate(stories, noise_floor=True, **options)


def test_the_cost_of_a_quantized_kv_cache(stories, texts, monkeypatch):
    options = {"against": stories, "texts": texts, "window": 64, "device": "cpu", "noise_floor": True}
    plain = evaluate(stories, **options)
    for kv_cache, least, most in (("int8", 1e-7, 1e-3), ("int4", 1e-3, 0.2)):
        found = evaluate(stories, kv_cache=kv_cache, **options)
        assert all(least < metrics.kl_mean < most for metrics in found.texts.values())
        assert found.noise_floor == plain.noise_floor and found.to_dict()["kv_cache"] == kv_cache
    with pytest.raises(UsageError, match="unknown KV cache format 'int2'"):
        evaluate(stories, texts=texts, kv_cache="int2", device="cpu")
    with pytest.raises(UsageError, match="tasks run without"):
        evaluate(stories, texts=texts, kv_cache="int8", tasks=Tasks(("arc_easy",)))
    monkeypatch.setattr(runner, "free_memory", lambda device: 100_000)
    with pytest.raises(EnvironmentProblem, match=r"1.04 MB, 100.00 kB are free on cpu: it can only run"):
        evaluate(stories, texts=texts, kv_cache="int8", device="cpu")


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


@pytest.mark.parametrize(("after", "budget_windows", "scored"), [(2, 100, 0), (6, 100, 2), (9, 2, 5)])
def test_an_interrupted_evaluation_goes_on_with_the_same_figures(
    stories, perturbed, texts, tmp_path, after, budget_windows, scored, monkeypatch
):
    options = {"against": stories, "texts": texts, "window": 32, "device": "cpu", "max_windows": 2}
    options |= {"noise_floor": True, "budget_bytes": budget_windows * 31 * 512 * 4}
    expected = evaluate(perturbed, **{name: options[name] for name in options if name != "budget_bytes"})
    calls, limit = 0, after

    def counting(*_):
        nonlocal calls
        if calls == limit:
            raise Interrupted
        calls += 1

    monkeypatch.setattr(runner, "check_finite", counting)
    partial = Partial(tmp_path)
    with pytest.raises(Interrupted):
        evaluate_many([perturbed], EvalOptions(**options), partial=partial)
    assert len(list(tmp_path.rglob("*.scores"))) == scored
    limit, steps = -1, []
    (again,) = evaluate_many(
        [perturbed],
        EvalOptions(**options),
        partial=partial,
        progress=lambda done, total, _: steps.append((done, total)),
    )
    assert figures(again) == figures(expected) and again.noise_floor == expected.noise_floor
    # 4 windows of the reference, the model and the noise floor, none of them twice.
    assert calls == 12
    assert steps[-1][0] == steps[-1][1]
    assert any("interrupted" in note for note in again.notes) == (scored > 0)
    partial.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_of_other_settings_or_cut_short_is_not_used(stories, perturbed, texts, tmp_path):
    options = {"against": stories, "texts": texts[:1], "window": 32, "device": "cpu", "max_windows": 2}
    partial = Partial(tmp_path)
    first = evaluate_many([perturbed], EvalOptions(**options), partial=partial)[0]
    other = evaluate_many([perturbed], EvalOptions(**options | {"dtype": "bfloat16"}), partial=partial)[0]
    assert other.notes == () and figures(other) != figures(first)
    for file in tmp_path.rglob("*.scores"):
        file.write_bytes(file.read_bytes()[:-8])
    again = evaluate_many([perturbed], EvalOptions(**options), partial=partial)[0]
    assert again.notes == () and figures(again) == figures(first)
    again = evaluate_many([perturbed], EvalOptions(**options), partial=partial)[0]
    assert again.notes == ("perturbed: 2 of 2 batches of windows come from a run that was interrupted",)


def test_partial_results_that_cannot_be_written_are_an_error(stories, texts, tmp_path):
    (tmp_path / "file").write_text("")
    partial = Partial(tmp_path / "file" / "in")
    with pytest.raises(OutputError, match="cannot write partial results"):
        evaluate_many(
            [stories], EvalOptions(texts=texts, window=64, max_windows=1, device="cpu"), partial=partial
        )


def test_one_reference_serves_several_models(stories, perturbed, texts, monkeypatch):
    options = {"texts": texts, "window": 64, "max_windows": 2, "device": "cpu"}
    expected = evaluate(perturbed, against=stories, **options)
    opened = counted(monkeypatch)
    with Reference(stories, EvalOptions(**options)) as reference:
        files = reference._files
        first = evaluate(perturbed, reference=reference, **options)
        evaluate(stories, reference=reference, **options)
        assert any(files.iterdir())
        with pytest.raises(UsageError, match="same settings"):
            evaluate(perturbed, reference=reference, **options | {"window": 32})
        with pytest.raises(UsageError, match="one of the two"):
            evaluate(perturbed, reference=reference, against=perturbed, **options)
    assert opened == [stories, perturbed, stories]
    assert figures(first) == figures(expected)
    assert not files.exists()


def test_a_cache_directory_is_found_again(stories, perturbed, texts, tmp_path, monkeypatch):
    options = {"against": stories, "texts": texts, "window": 32, "device": "cpu", "cache_dir": tmp_path}
    options["max_windows"] = 2
    first = evaluate_many([perturbed], EvalOptions(**options))[0]
    opened = counted(monkeypatch)
    again = evaluate_many([perturbed], EvalOptions(**options))[0]
    assert opened == [perturbed] and figures(first) == figures(again)
    # A file cut short is computed again, and another text is another key.
    file = sorted(tmp_path.glob("*/*.f32"))[0]
    file.write_bytes(file.read_bytes()[:-4])
    assert figures(evaluate_many([perturbed], EvalOptions(**options))[0]) == figures(first)
    evaluate_many([perturbed], EvalOptions(**options | {"texts": texts[:1]}))
    assert opened == [perturbed, stories, perturbed, stories, perturbed]
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("cached", [True, False])
def test_only_logits_that_outlive_the_process_are_synced(
    stories, perturbed, texts, tmp_path, monkeypatch, cached
):
    synced = []
    monkeypatch.setattr(os, "fsync", synced.append)
    options = {"against": stories, "texts": texts, "window": 32, "device": "cpu", "max_windows": 2}
    evaluate_many([perturbed], EvalOptions(**options, cache_dir=tmp_path if cached else None))
    assert bool(synced) == cached


def test_the_report_is_json_with_the_agreed_names(stories, perturbed, texts):
    seen = []
    report = evaluate(
        perturbed,
        against=stories,
        texts=texts,
        window=2000,
        device="cpu",
        progress=lambda done, total, label: seen.append((done, total, label)),
    )
    content = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert content["version"] == 1 and content["window"] == 512 and content["dtype"] == "float32"
    assert "cut to 512" in content["notes"][0]
    assert set(content["texts"]) == {"a.txt", "b.txt"}
    assert set(content["texts"]["a.txt"]) >= REQUIRED
    assert content["bits_per_weight"] == {"linears": None, "model": 32.0}
    assert content["bytes"]["model"] == Checkpoint.open(perturbed).nbytes
    assert content["bytes"]["reference"] == Checkpoint.open(stories).nbytes
    assert {"quantkit_version", "torch", "transformers", "seconds", "device"} <= set(content)
    assert [done for done, total, _ in seen if done == total] and "perturbed on b.txt" in seen[-1][2]


def test_without_a_reference_there_is_only_perplexity(stories, texts):
    report = evaluate(stories, texts=texts[:1], window=64, max_windows=2, device="cpu")
    content = json.loads(report.to_json())
    assert content["against"] is None and content["bytes"]["reference"] is None
    metrics = content["texts"]["a.txt"]
    assert 1 < metrics["perplexity"] < 512 and metrics["tokens"] == 126
    assert all(metrics[name] is None for name in REQUIRED - {"perplexity", "tokens"})


def test_models_of_different_vocabularies_are_not_compared(stories, texts):
    other = ROOT.parent / "shared" / "models" / "tinystories-656k"
    if not other.is_dir():
        pytest.skip("tinystories-656k is not here")
    with pytest.raises(CheckpointError, match=r"vocabulary has 2048 and 512"):
        evaluate(other, against=stories, texts=texts, window=64, device="cpu")


def test_tokenizers_of_one_size_that_differ_are_not_compared(stories, perturbed, texts, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(perturbed, other)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    path.unlink()
    vocabulary = content["model"]["vocab"]
    vocabulary["▁was"], vocabulary["▁her"] = vocabulary["▁her"], vocabulary["▁was"]
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="different tokens"):
        evaluate(other, against=stories, texts=texts, window=64, device="cpu")


def test_logits_that_are_not_finite_are_an_error(stories, texts, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(stories, broken)
    tensors = load_file(stories / "model.safetensors")
    tensors["model.norm.weight"][3] = math.nan
    (broken / "model.safetensors").unlink()
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not finite"):
        evaluate(broken, texts=texts, window=64, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int8"}, "unknown dtype"),
        ({"batch": 0}, "batch is 0"),
        ({"window": 1}, "window is 1"),
        ({"max_windows": 0}, "max_windows is 0"),
        ({"window": 64, "stride": 0}, "stride is 0; use 1 to 64"),
        ({"texts": ()}, "nothing to evaluate on"),
    ],
)
def test_wrong_options_are_named(stories, texts, options, message):
    with pytest.raises(UsageError, match=message):
        evaluate(stories, **{"texts": texts, "device": "cpu", **options})


def test_blocks_keep_batches_and_the_budget():
    assert plan_blocks([5, 2], 2, 10, 40) == (
        (Batch(0, 0, 2), Batch(0, 2, 4)),
        (Batch(0, 4, 5), Batch(1, 0, 2)),
    )
    for budget in range(20, 100):
        blocks = plan_blocks([5, 2], 2, 10, budget)
        assert sum(blocks, ()) == plan_blocks([5, 2], 2, 10, 1000)[0]
        assert all(sum(10 * (b.stop - b.start) for b in block) <= budget for block in blocks)
    with pytest.raises(UsageError, match="take 20 bytes, the budget is 19"):
        plan_blocks([5, 2], 2, 10, 19)


def test_a_full_disk_is_told_before_the_model_runs(stories, texts, monkeypatch):
    usage = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(OutputError, match="where 1000 are free"):
        Reference(stories, EvalOptions(texts=texts, window=64, device="cpu"))


@pytest.mark.parametrize(
    ("format_name", "group_size", "zero_point", "bits", "container"),
    [
        ("int4", 32, "none", 4 + 16 / 32, "compressed-tensors"),
        ("int4", 32, "integer", 4 + 20 / 32, "compressed-tensors"),
        ("int4", 32, "float", 4 + 32 / 32, "quantkit"),
        ("nvfp4", None, "none", 4 + 8 / 16 + 32 / (96 * 64), "compressed-tensors"),
        ("mxfp4", None, "none", 4 + 8 / 32, "compressed-tensors"),
        ("mxfp8", None, "none", 8 + 8 / 32, "compressed-tensors"),
        ("fp8", None, "none", 8 + 16 / 64, "compressed-tensors"),
        ("int8", "channel", "none", 8 + 16 / 64, "compressed-tensors"),
        ("binary", 32, "none", 1 + 16 / 32, "quantkit"),
    ],
)
def test_bits_per_weight_count_every_byte(tmp_path, format_name, group_size, zero_point, bits, container):
    chosen = scheme(format_name, group_size=group_size, zero_point=zero_point).for_columns(64)
    rows, columns, dense = 96, 64, 1000
    codes = torch.zeros(rows, columns, dtype=torch.uint8)
    groups = chosen.groups(columns)
    zeros = None if zero_point == "none" else torch.zeros(rows, groups, dtype=torch.uint8)
    factor = torch.ones(1) if chosen.global_scale else None
    packed = PackedTensor.from_codes(codes, torch.ones(rows, groups), zeros, chosen, factor)
    stored = stored_format(chosen, columns, container)
    parts = {**dict(packed.parts()), "shape": torch.tensor([rows, columns])}
    shapes = stored.shapes(chosen.storage_shapes((rows, columns)))
    tensors = {stored.part_name("layer.weight", part): stored.to_file(part, parts[part]) for part in shapes}
    tensors["lm_head.weight"] = torch.zeros(10, 100, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    assignment = Assignment("layer", ("layer",), (rows, columns), chosen)
    config = QuantizationConfig.from_assignments([assignment])
    assert config.container == container
    section = config.to_dict([assignment])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))

    found = measure(Checkpoint.open(tmp_path))
    shape_bits = 128 if "shape" in shapes else 0
    nbytes = packed.nbytes - (128 - shape_bits) // 8
    assert found.linears == 8 * nbytes / (rows * columns)
    assert found.linears == pytest.approx(bits + shape_bits / (rows * columns))
    total = nbytes + 2 * dense
    assert found.model == 8 * total / (rows * columns + dense)
    assert found.format == str(chosen)
    assert found.nbytes == total < (tmp_path / "model.safetensors").stat().st_size

    if "shape" not in shapes:
        return
    tensors["layer.weight_shape"] = torch.tensor([rows, 100 * columns])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="no more weights than bits"):
        measure(Checkpoint.open(tmp_path))


def test_packed_models_are_told_apart_from_their_original(stories, texts, tmp_path):
    packed = {name: tmp_path / name for name in ("int8", "binary")}
    for name, directory in packed.items():
        quantize(stories, directory, format=name, method="rtn", device="cpu")
    options = {"against": stories, "texts": texts, "window": 64, "max_windows": 2, "device": "cpu"}
    int8, binary = evaluate_many(list(packed.values()), EvalOptions(**options))
    for text in ("a.txt", "b.txt"):
        assert 0 < int8.texts[text].kl_mean < 0.01 < 0.3 < binary.texts[text].kl_mean
        assert int8.texts[text].same_top1 > 0.95 > binary.texts[text].same_top1
    for report in (int8, binary):
        manifest = json.loads((Path(report.model) / "quantkit_manifest.json").read_text())
        assert report.to_dict()["bits_per_weight"] == pytest.approx(manifest["bits_per_weight"])
        assert report.sizes.method == "rtn" and report.sizes.format.startswith(report.label)


@pytest.mark.skipif(not (BOOKS.is_dir() and TEXTS.is_dir()), reason="books-28m is not here")
def test_the_protocol_gives_the_known_perplexities():
    report = evaluate(
        BOOKS, texts=[TEXTS / "books.txt", TEXTS / "docs.txt"], window=1024, max_windows=2, device="cpu"
    )
    # Of transformers alone, window by window.
    assert report.texts["books.txt"].perplexity == pytest.approx(23.630, abs=0.005)
    assert report.texts["docs.txt"].perplexity == pytest.approx(7.239, abs=0.005)
    assert report.texts["books.txt"].tokens == 2 * 1023


@pytest.mark.parametrize(
    ("device", "stored", "dtype"),
    [
        ("cpu", "bfloat16", "float32"),
        ("cuda", "bfloat16", "bfloat16"),
        ("cuda", "float32", "float32"),
        ("cuda", None, "float32"),
    ],
)
def test_activations_are_in_what_the_device_is_fast_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, stored: str | None, dtype: str
) -> None:
    monkeypatch.setattr(models, "pick_device", lambda name: torch.device(device))
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": stored}))
    assert models.dtype_for("auto", "auto", tmp_path) == dtype
    assert models.dtype_for("float16", "auto", tmp_path) == "float16"

"""Checkpoints under other names than their model's are written as those under its own."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

from quantkit.errors import CheckpointError
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize
from quantkit.runtime.load import load

from ..support.compare import assert_equal
from ..tiny.calibrated import data

STORIES = Path(__file__).resolve().parents[2] / "examples" / "stories260K"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = dict[str, torch.Tensor]


def renamed(directory: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """stories260K, which is tied, with other names or tensors."""
    shutil.copytree(STORIES, directory)
    path = directory / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})
    return directory


def written(source: Path, out: Path, **options: Any) -> tuple[Tensors, tuple[str, ...]]:
    result = quantize(source, out, device="cpu", **{"format": "int4", "group_size": 32, **options})
    return load_file(out / "model.safetensors"), result.plan.notes


WRAPPED = {
    "module.": lambda name: f"module.{name}",
    "_orig_mod.": lambda name: f"_orig_mod.{name}",
    "base_model.model.": lambda name: f"base_model.model.{name}",
    "model.": lambda name: f"model.{name}",
    "module._orig_mod.": lambda name: f"module._orig_mod.{name}",
    "student.": lambda name: f"student.{name}",
    "_fsdp_wrapped_module.": lambda name: name.replace("mlp.", "_fsdp_wrapped_module.mlp."),
    "actor.": lambda name: f"actor.{name.replace('.mlp.', '._orig_mod.mlp.')}",
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    return written(STORIES, tmp_path_factory.mktemp("renamed") / "out")[0]


@pytest.mark.parametrize("prefix", WRAPPED)
def test_what_wrappers_put_before_names_is_taken_off(tmp_path, expected, prefix):
    names = WRAPPED[prefix]
    source = renamed(tmp_path / "source", lambda tensors: {names(name): one for name, one in tensors.items()})
    found, notes = written(source, tmp_path / "out")
    assert_equal(found, expected)
    (note,) = (note for note in notes if "was taken off" in note)
    assert note.startswith(f"'{prefix.partition('.')[0]}.")
    if prefix == "model.":
        return  # transformers takes it off too.
    with pytest.raises(CheckpointError, match=r"quantize` takes it off\. Write a dense copy") as caught:
        load(source, device="cpu")
    # The command that it names.
    command = str(caught.value).partition("key_mapping=")[2].partition(")")[0]
    dense = AutoModelForCausalLM.from_pretrained(source, key_mapping=json.loads(command.replace("'", '"')))
    embedding = load_file(STORIES / "model.safetensors")[EMBEDDING]
    assert_equal(dense.get_input_embeddings().weight, embedding)


def test_names_that_no_prefix_explains(tmp_path):
    def without_norms(tensors: Tensors) -> Tensors:
        return {f"module.{name}": one for name, one in tensors.items() if "norm" not in name}

    def with_adapter(tensors: Tensors) -> Tensors:
        return {name.replace("q_proj.", "q_proj.base_layer."): one for name, one in tensors.items()}

    with pytest.raises(
        CheckpointError, match=r"no tensor for .* closest name is 'module.model.*'architectures'"
    ):
        plan(renamed(tmp_path / "lost", without_norms), QuantizeOptions())
    with pytest.raises(CheckpointError, match=r"an adapter beside its weights .* merge_and_unload"):
        plan(renamed(tmp_path / "adapter", with_adapter), QuantizeOptions())


# Ties: what a file with the head alone becomes is what one with the embedding alone becomes.


@pytest.fixture(scope="module")
def head_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tied") / "source"
    return renamed(directory, lambda t: {HEAD if n == EMBEDDING else n: one for n, one in t.items()})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": "gptq"},
        {"method": "awq", "lm_head": "int8"},
        {"method": "best", "lm_head": "int4:32"},
        {"method": "signround"},
        {"rotate": True},
        {"rotate": True, "lm_head": "int8", "method": "imatrix"},
    ],
    ids=str,
)
@pytest.mark.sampled(3)
def test_a_tie_is_followed_from_the_head(tmp_path, head_only, text, options):
    calibrated = options.get("method") is not None
    more = {"calibration": data(text, samples=4)} if calibrated else {}
    found, notes = written(head_only, tmp_path / "head", **options, **more)
    assert_equal(found, written(STORIES, tmp_path / "embedding", **options, **more)[0])
    assert f"{HEAD} is stored as {EMBEDDING}, to which it is tied" in notes
    assert load(tmp_path / "head", device="cpu").get_input_embeddings().weight.isfinite().all()


def test_formats_are_allocated_where_the_head_alone_is_stored(tmp_path, head_only, text):
    def allocated(source: Path) -> Any:
        budget = Budget(BitsPerWeight(5.0), ("int4:32", "int8"))
        asked = QuantizeOptions(budget=budget, calibration=data(text, samples=1), device="cpu")
        return plan(source, asked)[1].allocation

    assert allocated(head_only).shares == allocated(STORIES).shares


def test_a_tie_of_other_names(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4, n_positions=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "model.safetensors"
    tensors = load_file(path)
    (embedding,) = (name for name in tensors if name.endswith("wte.weight"))
    path.unlink()
    tensors[HEAD] = tensors.pop(embedding)
    save_file(tensors, path, metadata={"format": "pt"})
    options = {"format": "int8", "lm_head": "int8", "group_size": "channel"}
    found, _ = written(tmp_path / "source", tmp_path / "out", **options)
    assert found["transformer.wte.weight"].shape == (96, 64) and "lm_head.weight_scale" in found


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("options", [{}, {"lm_head": "int8"}, {"rotate": True}], ids=str)
def test_both_of_two_tied_tensors(tmp_path, same, options):
    """With other numbers transformers takes each for itself, and so does what is written."""

    def both(tensors: Tensors) -> Tensors:
        head = tensors[EMBEDDING].clone()
        return {**tensors, HEAD: head if same else head.flip(0).contiguous()}

    source = renamed(tmp_path / "source", both)
    written(source, tmp_path / "out", **{**options, "format": "int8", "group_size": None})
    prompt = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        dense, packed = (
            load(path, device="cpu", dtype=torch.float32)(prompt).logits
            for path in (source, tmp_path / "out")
        )
    assert (packed - dense).norm() < 0.03 * dense.norm()

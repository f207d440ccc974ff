"""Calibration of every kind of block: what linears see is what hooks on the whole model see."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit.calibrate.hessian import Hessian
from quantkit.model import hidden_states
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget
from quantkit.quantizing import quantize

from ...support.compare import assert_close
from ...tiny.calibrated import data, tokens_of, write

#: What blocks of these do beside taking and returning hidden states.
FAMILIES = (
    "gemma4",  # a positional argument, and keys and values that blocks leave in a dictionary for later ones
    "gemma3n",  # states [4, B, T, d], and a linear that runs twice
    "llama4",  # the device of the embedding, asked before it runs
    "glm_moe_dsa",  # pairs, of which both go to the next block
    "falcon_h1",  # tuples
    "gpt2",  # weights [K, N], blocks called `h`
    "bloom",  # ALiBi for all heads of all samples in one axis
    "mpt",  # blocks called `blocks`
    "gptj",
    "falcon",  # a subclass of Linear
    "opt",  # linears before and after the blocks
    "rwkv",  # a state
    "t5",  # two lists of blocks, and a bias that the first of each computes for all
    "bart",
    "bert",  # a linear between the blocks and the head
    "embedding",  # no head
    "vision",  # a text decoder inside, and blocks that text does not run
)


BUDGET = Budget(BitsPerWeight(5.0), ("int4:32", "int8"))
#: Those whose head can be packed apart from the embedding and is called lm_head.
WITH_HEAD = FAMILIES[: FAMILIES.index("rwkv")]


@pytest.mark.parametrize("family", FAMILIES)
def test_hessians_are_those_of_hooks_on_the_whole_model(
    tmp_path: Path, text: Path, hessians: dict[str, Hessian], family: str
) -> None:
    """With weights that stay what they were, so that every linear sees what it does in the original."""
    source = write(tmp_path, family, torch.float32)
    made = quantize(
        source,
        tmp_path / "out",
        format="int8",
        method="gptq",
        lm_head="int8" if family in WITH_HEAD else None,
        calibration=data(text),
    )
    linears = [
        one.linear for one in made.plan.layers if one.scheme is not None and one.linear.kind != "experts"
    ]
    assert set(hessians) == {linear.module for linear in linears} != set()

    (architecture,) = json.loads((source / "config.json").read_text())["architectures"]
    model = getattr(transformers, architecture).from_pretrained(source, dtype=torch.float32).eval()
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in hessians}

    def keep(name: str) -> Any:
        return lambda _, given: inputs[name].append(given[0].flatten(0, -2).double())

    for name in hessians:
        model.get_submodule(name).register_forward_pre_hook(keep(name))
    model.set_experts_implementation("eager")
    tokens = {"input_ids": tokens_of(source, text)}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = tokens["input_ids"]
    with torch.no_grad():
        model(**tokens)
    for name, hessian in hessians.items():
        x = torch.cat(inputs[name])
        assert hessian.tokens == len(x)
        assert_close(hessian.matrix.double(), x.T @ x / len(x), rtol=1e-3, atol=1e-3, name=name)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("family", ["llama", "gemma4", "falcon_h1", "t5"])
@pytest.mark.parametrize("asked", [{"method": "best"}, {"method": "gptq", "budget": BUDGET}], ids=str)
def test_a_gpu_writes_the_same_wherever_hidden_states_wait(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, family: str, asked: dict[str, Any]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write(tmp_path, family)
    default = hidden_states.HIDDEN_BYTES, hidden_states.HOST_MEMORY
    written = []
    for at, (on_gpu, on_host) in enumerate((default, (0, default[1]), (0, 0.0))):
        monkeypatch.setattr(hidden_states, "HIDDEN_BYTES", on_gpu)
        monkeypatch.setattr(hidden_states, "HOST_MEMORY", on_host)
        quantize(source, tmp_path / f"{at}", device="cuda", calibration=data(text), **asked)
        written.append((tmp_path / f"{at}" / "model.safetensors").read_bytes())
    assert written[0] == written[1] == written[2]

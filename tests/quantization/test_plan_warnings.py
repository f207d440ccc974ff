"""Notes on a plan, and what is refused before a model is built."""

import json
import re
import shutil
from pathlib import Path

import pytest

from quantkit.checkpoint.engines import SGLANG, VLLM
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.structure import read_structure
from quantkit.quantization.plan import make_plan
from quantkit.recipes.recipe import Choice, Recipe, Rule
from quantkit.runtime.load import load

STORIES = Path(__file__).parents[2] / "examples" / "stories260K"


INT4 = Choice("int4", 32)


def notes(*rules: Rule, default: Choice = INT4) -> tuple[str, ...]:
    checkpoint = Checkpoint.open(STORIES)
    return make_plan(checkpoint, read_structure(checkpoint), Recipe(default, rules)).notes


def test_a_uniform_plan_has_no_notes():
    assert notes() == ()


def test_fused_linears_of_different_schemes_are_noted():
    split = Rule("*.q_proj", Choice("int8")), Rule("*.layers.0.mlp.up_proj", Choice(keep=True))
    (note,) = notes(*split, default=Choice("int4", 4))
    assert note.startswith(
        "vLLM and SGLang cannot load this: they fuse these linears, which then need one scheme"
    )
    assert re.search(r"model.layers.\d.(self_attn.q_proj int8 channel|mlp.gate_proj int4 g4)", note)
    assert note.endswith("and 5 more. Match each such set with rules of one format.")


def test_an_untied_head_is_noted():
    (note,) = notes(Rule("lm_head", Choice("int8")))
    assert note.startswith("lm_head and the embedding are stored apart")


def test_zero_points_that_plain_transformers_misreads_are_noted():
    (note,) = notes(default=Choice("int4", "channel", zero_point="integer"))
    assert "only with compressed-tensors up to 0.17" in note


def test_formats_that_plain_transformers_runs_as_bfloat16_only_are_noted():
    kept = Rule("*.down_proj", Choice(keep=True))
    sglang, note = notes(kept, default=Choice("mxfp4"))
    assert re.fullmatch(
        r"SGLang 0\.5\.23 cannot load mxfp4: model\S+ and \d+ more\. Choose int4 or nvfp4\.", sglang
    )
    assert note.startswith(
        "transformers without quantkit runs mxfp4-pack-quantized with dtype=torch.bfloat16 only"
    )
    assert notes(kept, default=Choice("fp8")) == ()


def test_one_scale_per_tensor_of_integers_is_noted():
    kept = Rule("*.down_proj", Choice("fp8", "tensor"))
    (note,) = notes(kept, default=Choice("int8", "tensor"))
    assert note.startswith(f"{VLLM} and {SGLANG} cannot load integers with one scale per tensor: model.")
    assert note.endswith("Choose scales per channel or group: -g channel or -g 128.")
    assert notes(default=Choice("fp8", "tensor")) == ()


def test_blocks_that_vllm_does_not_load_are_noted():
    vllm, sglang = notes(default=Choice("fp8", "4x4"))
    assert vllm.startswith(f"{VLLM} cannot load fp8 in other than whole blocks of 128x128: model.")
    assert sglang.startswith(f"{SGLANG} cannot load fp8 in blocks: model.")


def test_scales_of_nvfp4_are_noted():
    kept = Rule("*.down_proj", Choice(keep=True))
    (note,) = notes(kept, default=Choice("nvfp4"))
    assert "nvfp4-pack-quantized with dtype=torch.bfloat16 only" in note


def edited(directory: Path, **changes: object) -> Path:
    shutil.copytree(STORIES, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


@pytest.mark.parametrize(
    "open_it", [lambda d: read_structure(Checkpoint.open(d)), load], ids=["plan", "load"]
)
@pytest.mark.parametrize("changes", [{"num_hidden_layers": 10**9}, {"text_config": {"n_layer": 10**6}}])
def test_a_config_of_more_layers_than_tensors_is_refused_at_once(open_it, changes, tmp_path):
    with pytest.raises(CheckpointError, match=r"layers?' is 10+, but the files hold 47 tensors"):
        open_it(edited(tmp_path / "model", **changes))


def test_fewer_layers_than_the_file_has_are_noted(tmp_path):
    checkpoint = Checkpoint.open(edited(tmp_path / "model", num_hidden_layers=3))
    (note,) = make_plan(checkpoint, read_structure(checkpoint), Recipe(Choice("int4", 32))).notes
    assert note.startswith("18 tensors, such as model.layers.3.") and "they are copied" in note

"""Without a class, names and shapes decide what is a linear, and every other tensor has a reason."""

from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.model.model_free import SIGNS, UNKNOWN, read_tensors

LAYER = "model.layers.0."
CONFIG = {"num_hidden_layers": 2}
LINEAR = None
#: A tensor with its shape and dtype, and why it is no linear; with "rule:" if a rule may pack it.
TENSORS: dict[str, tuple[tuple[int, ...], str, str | None]] = {
    f"{LAYER}self_attn.q_proj.weight": ((256, 256), "BF16", LINEAR),
    f"{LAYER}self_attn.q_proj.bias": ((256,), "BF16", "a bias"),
    f"{LAYER}self_attn.k_proj.weight": ((8, 256), "F16", LINEAR),
    # The gate of an MLP, not that of a mixture.
    f"{LAYER}mlp.gate.weight": ((512, 256), "F32", LINEAR),
    f"{LAYER}mixer.x_proj.weight": ((512, 64), "BF16", LINEAR),
    f"{LAYER}mixer.dt_proj.weight": (
        *((512, 64), "BF16"),
        "rule: model code reads its weight itself, by its name",
    ),
    f"{LAYER}mixer.A_log": ((512, 16), "BF16", "its name does not end in .weight, as that of a linear does"),
    f"{LAYER}mixer.conv1d.weight": ((512, 1, 4), "BF16", "more than two dimensions, as convolutions have"),
    f"{LAYER}mixer.short_conv.weight": ((512, 4), "BF16", "a convolution, by its name"),
    f"{LAYER}input_layernorm.weight": ((256,), "F32", "a vector, such as the weight of a norm"),
    f"{LAYER}head_norm.weight": ((4, 64), "F32", "a norm, by its name"),
    f"{LAYER}attn.relative_attention_bias.weight": ((32, 8), "F32", "a table of biases, by its name"),
    f"{LAYER}ids.weight": ((4, 4), "I64", "its dtype is none that is quantized"),
    f"{LAYER}moe.gate.weight": ((8, 256), "BF16", "rule: a router, by its name"),
    f"{LAYER}moe.router.proj.weight": ((8, 256), "BF16", "rule: a router, by its name"),
    f"{LAYER}moe.shared_gate.weight": (
        *((1, 256), "BF16"),
        "it has one output: packing it saves next to nothing",
    ),
    f"{LAYER}ffn.experts.gate_up": (
        *((6, 512, 256), "BF16"),
        "experts in one tensor, whose layout the tensors do not tell",
    ),
    f"{LAYER}ffn.chooser.weight": (
        *((6, 256), "BF16"),
        "rule: a router: it has a row for each expert beside it",
    ),
    f"{LAYER}zaya.gate.up.weight": ((512, 256), "BF16", "rule: a router, by its name"),
    # Parts of names that do not say what a tensor is.
    f"{LAYER}input_norm.up.weight": ((64, 256), "BF16", LINEAR),
    f"{LAYER}conv.in_proj.weight": ((64, 256), "BF16", LINEAR),
    "model.blocks.0.fc.weight": ((64, 256), "BF16", LINEAR),
    "model.heads.0.weight": (
        *((64, 256), "BF16"),
        "rule: outside the repeated blocks: its name has no number of one",
    ),
    f"{LAYER}wide.weight": ((64, 200), "BF16", "rule: its rows are not whole groups"),
    "model.layers.2.eh_proj.weight": (
        *((256, 512), "BF16"),
        "rule: of a block beyond those that config.json counts",
    ),
    "mtp.layers.0.fc.weight": ((256, 512), "BF16", "rule: of a head of further tokens, by its name"),
    "visual.blocks.0.qkv.weight": ((384, 128), "BF16", "rule: of a part beside that for text, by its name"),
    "visual.patch_embed.proj.weight": (
        *((128, 3, 2, 14, 14), "BF16"),
        "more than two dimensions, as convolutions have",
    ),
    "visual.pos_embed.weight": ((64, 128), "BF16", "an embedding"),
    "model.embed_tokens.weight": ((512, 256), "BF16", "an embedding"),
    "model.merger.mlp.0.fc.weight": ((256, 128), "BF16", "rule: of a part beside that for text, by its name"),
}  # fmt: skip


def checkpoint(tensors: dict[str, tuple[Any, ...]], config: dict[str, Any] = CONFIG) -> Checkpoint:
    stored = {
        name: StoredTensor(name, dtype, shape, Path("f"), 0) for name, (shape, dtype, *_) in tensors.items()
    }
    return Checkpoint(Path(), config, stored, (), (), (), {})


def test_every_tensor_is_a_linear_or_has_a_reason():
    found, structure = read_tensors(checkpoint(TENSORS), 128)
    reasons: dict[str, str | None] = dict(structure.dense)
    for module, linear in structure.linears.items():
        for name in linear.stored:
            kept = structure.kept.get(module)
            reasons[f"{name}.weight"] = kept and f"rule: {kept}"
            assert linear.shape == TENSORS[f"{name}.weight"][0]
    assert reasons == {name: reason for name, (_, _, reason) in TENSORS.items()}
    assert found.notes == (UNKNOWN,)
    # All signs but that of the head, which has a test of its own.
    seen = {str(reason).removeprefix("rule: ") for reason in reasons.values()}
    assert {sign.reason for sign in SIGNS} - seen == {"the head, by its name"}


def test_a_model_of_images_alone_is_packed():
    """And of a model beside a language model, only that."""
    tensors = {f"vision_model.layers.0.{leaf}.weight": ((64, 64), "BF16") for leaf in ("q_proj", "fc1")}
    _, structure = read_tensors(checkpoint(tensors), None)
    assert len(structure.linears) == 2 and structure.kept == {}
    text = {f"{name}.0.fc.weight": ((64, 64), "BF16") for name in ("language_model.layers", "encoder.layers")}
    _, structure = read_tensors(checkpoint({**tensors, **text, "lm_head.weight": ((64, 64), "BF16")}), None)
    assert set(structure.linears) - set(structure.kept) == {"language_model.layers.0.fc", "lm_head"}


def test_what_no_rule_packs_is_declared_but_for_embeddings():
    _, structure = read_tensors(checkpoint(TENSORS), 128)
    matrices = [
        name.removesuffix(".weight")
        for name, (shape, _, reason) in TENSORS.items()
        if len(shape) > 1 and name in structure.dense and reason != "an embedding"
    ]
    assert list(structure.unpackable) == [*matrices, "lm_head"]


def test_the_head_is_packed_on_request_only():
    _, structure = read_tensors(checkpoint({"lm_head.weight": ((512, 256), "BF16")}), 128)
    assert structure.linears["lm_head"].kind == "lm_head"
    assert structure.kept == {} and structure.unpackable == {}


def test_numbered_experts_are_one_linear_for_each_name():
    names = [f"{LAYER}mlp.experts.{n}.{leaf}_proj" for n in range(12) for leaf in ("up", "down")]
    shapes = [(64, 32) if "up" in name else (32, 64) for name in names]
    tensors = {f"{name}.weight": (shape, "BF16") for name, shape in zip(names, shapes, strict=True)}
    _, structure = read_tensors(checkpoint({**tensors, f"{LAYER}mlp.w_r.weight": ((12, 32), "BF16")}), 32)
    up, down = (structure.linears[f"{LAYER}mlp.experts.{leaf}_proj"] for leaf in ("up", "down"))
    assert (up.kind, up.shape, up.stored) == ("experts", (64, 32), tuple(names[::2]))
    assert (down.kind, down.shape, down.stored) == ("experts", (32, 64), tuple(names[1::2]))
    assert list(structure.kept) == [f"{LAYER}mlp.w_r"]


def test_experts_of_several_shapes_are_linears_of_their_own():
    tensors = {f"e.experts.{n}.up.weight": ((32 * n, 32), "BF16") for n in (2, 3)}
    _, structure = read_tensors(checkpoint(tensors), None)
    assert [linear.shape for linear in structure.linears.values()] == [(64, 32), (96, 32)]
    assert list(structure.linears) == ["e.experts.2.up", "e.experts.3.up"]


@pytest.mark.parametrize(
    ("config", "beyond"),
    [
        ({}, False),
        ({"num_hidden_layers": 1}, True),
        ({"num_hidden_layers": 9, "text_config": {"num_hidden_layers": 1}}, True),
        ({"n_layer": 1}, True),
        ({"num_hidden_layers": "1", "text_config": 3}, False),
    ],
)
def test_config_counts_the_blocks(config, beyond):
    _, structure = read_tensors(checkpoint({"layers.1.w.weight": ((64, 64), "BF16")}, config), None)
    assert bool(structure.kept) == beyond

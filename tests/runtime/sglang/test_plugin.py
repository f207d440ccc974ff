"""The plug-in on stubs of SGLang's classes; `tests/engines/run_sglang.py` runs it in SGLang."""

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import quantkit.runtime.sglang
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.packing.schemes import Scheme
from quantkit.runtime.serving.stored_schemes import StoredSchemes

from ...support.compare import assert_equal
from ...test_import import imported_by
from ...tiny.packed import SCHEMES, absmax_pack, config_of
from ..serving.test_fused_linear import file_entries

INT4, INT8 = SCHEMES["int4"], SCHEMES["int8"]
LAYERS = "sglang.srt.layers"
#: Classes of SGLang that the plug-in imports, by module.
NAMES = {
    f"{LAYERS}.quantization.base_config": (
        "QuantizationConfig",
        "QuantizeMethodBase",
        "LinearMethodBase",
        "FusedMoEMethodBase",
    ),
    f"{LAYERS}.quantization.unquant": ("UnquantizedLinearMethod",),
    f"{LAYERS}.moe.fused_moe_triton.layer": ("FusedMoE",),
    f"{LAYERS}.moe.token_dispatcher": (),
    f"{LAYERS}.linear": ("LinearBase",),
    f"{LAYERS}.vocab_parallel_embedding": ("VocabParallelEmbedding",),
    "sglang.srt.distributed.utils": (),
    "sglang.srt.arg_groups.choices": (),
}
MODULES = ("FusedMoE", "LinearBase", "VocabParallelEmbedding")
OWN = ("config", "methods")


class CombineInput(NamedTuple):
    hidden_states: torch.Tensor


class Group(NamedTuple):
    rank: int
    size: int


def modules_of_sglang() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    for name, classes in NAMES.items():
        parents = name.split(".")
        for length in range(1, len(parents) + 1):
            found.setdefault(".".join(parents[:length]), ModuleType(".".join(parents[:length])))
        for one in classes:
            setattr(found[name], one, type(one, (nn.Module if one in MODULES else object,), {}))
    heads: Any = found[f"{LAYERS}.vocab_parallel_embedding"]
    heads.ParallelLMHead = type("ParallelLMHead", (heads.VocabParallelEmbedding,), {})
    unquantized: Any = found[f"{LAYERS}.quantization.unquant"]
    unquantized.UnquantizedLinearMethod.process_weights_after_loading = lambda self, layer: None
    dispatcher: Any = found[f"{LAYERS}.moe.token_dispatcher"]
    dispatcher.StandardCombineInput = CombineInput
    groups: Any = found["sglang.srt.distributed.utils"]
    groups.get_group_rank_size = lambda group: (0, 1) if group is None else group
    choices: Any = found["sglang.srt.arg_groups.choices"]
    choices.QUANTIZATION_CHOICES = ["awq"]
    tables: Any = found[f"{LAYERS}.quantization"]
    tables.QUANTIZATION_METHODS, tables.CPU_QUANTIZATION_METHODS = {}, {}
    return found


@pytest.fixture
def sglang(monkeypatch):
    """Stubs of SGLang in `sys.modules`, and modules of the plug-in that import them anew."""
    stubs = modules_of_sglang()
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in OWN:
        monkeypatch.delitem(sys.modules, f"quantkit.runtime.sglang.{name}", raising=False)
        monkeypatch.delattr(quantkit.runtime.sglang, name, raising=False)
    yield stubs
    for name in OWN:
        sys.modules.pop(f"quantkit.runtime.sglang.{name}", None)


def layer_of(sglang: dict[str, Any], place: str, kind: str, **attributes: Any) -> Any:
    layer = getattr(sglang[f"{LAYERS}.{place}"], kind)()
    for name, value in {"tp_group": None, "params_dtype": torch.float32, **attributes}.items():
        setattr(layer, name, value)
    return layer


def config_for(
    modules: dict[str, Scheme | None],
    *stored: str,
    default: Scheme = INT4,
    ties: bool = False,
    kind: str = "",
) -> Any:
    """The plug-in's config of a checkpoint whose files have the packed matrices `stored`."""
    from quantkit.runtime.sglang.config import QuantkitConfig

    architecture = {
        **(config_of(kind).to_dict() if kind else {}),
        "architectures": [f"{kind.title().replace('_', '')}ForCausalLM"],
    }
    names = [f"{one}.weight_scale" for one in stored]
    own = QuantizationConfig("quantkit", default, modules)
    return QuantkitConfig(StoredSchemes(own, names, architecture), {}, ties=ties)


def load(layer: Any, packed: Any, *shard: Any) -> None:
    for entry, tensor in file_entries(packed, "quantkit").items():
        parameter = getattr(layer, entry)
        parameter.weight_loader(parameter, tensor, *shard)


def test_the_entry_point_imports_nothing_heavy():
    modules = imported_by("import quantkit.runtime.sglang.register")
    assert not modules & {"torch", "transformers", "sglang"}


def test_sglang_learns_the_method_on_every_device(sglang):
    from quantkit.runtime.sglang.register import register

    register()
    register()
    choices: Any = sglang["sglang.srt.arg_groups.choices"]
    assert choices.QUANTIZATION_CHOICES == ["awq", "quantkit"]
    tables: Any = sglang[f"{LAYERS}.quantization"]
    assert list(tables.QUANTIZATION_METHODS) == list(tables.CPU_QUANTIZATION_METHODS) == ["quantkit"]


def test_an_sglang_that_moved_its_classes_is_one_error_naming_versions(sglang):
    from quantkit.runtime.sglang.register import register

    del sglang[f"{LAYERS}.linear"].LinearBase
    config = pytest.importorskip("quantkit.runtime.sglang.config")
    expected = (
        r"was tried with SGLang 0\.5\.23 on a CPU and does not fit SGLang .*: cannot import name 'LinearBase'"
    )
    with pytest.raises(EnvironmentProblem, match=expected):
        config.QuantkitConfig.from_config({})
    del sglang[f"{LAYERS}.quantization"].QUANTIZATION_METHODS
    with pytest.warns(UserWarning, match=r"was tried with SGLang 0\.5\.23 .*QUANTIZATION_METHODS"):
        register()


def test_a_config_reads_the_names_of_tensors_and_the_directory(sglang, tmp_path):
    from quantkit.runtime.sglang.config import QuantkitConfig

    section = QuantizationConfig("quantkit", INT4, {}).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    save_file({"b.o_proj.weight_scale": torch.ones(1)}, tmp_path / "model.safetensors")
    text = SimpleNamespace(tie_word_embeddings=True)
    found = SimpleNamespace(name_or_path=str(tmp_path), get_text_config=lambda: text)
    config = QuantkitConfig.from_config({**section, "hf_config": found})
    assert config.ties and config.schemes.packed == {"b.o_proj"}
    with pytest.raises(EnvironmentProblem, match=r"does not fit SGLang .*: 'hf_config'"):
        QuantkitConfig.from_config(section)


@pytest.mark.parametrize("rank", [0, 1])
def test_q_k_and_v_of_different_schemes_are_one_layer_on_each_rank(sglang, rank):
    config = config_for({"b.q_proj": INT8, "b.k_proj": None}, "b.q_proj", "b.v_proj")
    layer = layer_of(sglang, "linear", "LinearBase", tp_group=Group(rank, 2), num_kv_head_replicas=1)
    method = config.get_quant_method(layer, "b.qkv_proj")
    method.create_weights(layer, 64, [64, 32, 32], 64, 256, torch.float32, weight_loader=None)
    torch.manual_seed(0)
    q, k, v = (
        absmax_pack(torch.randn(128, 64), INT8),
        torch.randn(64, 64),
        absmax_pack(torch.randn(64, 64), INT4),
    )
    load(layer, q, "q")
    layer.weight.weight_loader(layer.weight, k, "k")
    load(layer, v, "v")
    method.process_weights_after_loading(layer)
    halves = [one.chunk(2)[rank] for one in (q.dequantize(), k, v.dequantize())]
    x = torch.randn(3, 64)
    with torch.no_grad():
        torch.testing.assert_close(method.apply(layer, x), x @ torch.cat(halves).T, rtol=1e-4, atol=1e-4)


def test_q_and_k_on_different_ranks_are_refused(sglang):
    layer = layer_of(sglang, "linear", "LinearBase", tp_group=Group(0, 2), kv_tp_group=Group(0, 1))
    method = config_for({}, "b.q_proj").get_quant_method(layer, "b.qkv_proj")
    with pytest.raises(UsageError, match=r"'b\.q_proj': SGLang divides q and k, v among different ranks"):
        method.create_weights(layer, 64, [64, 64, 64], 64, 384, torch.float32)


def test_a_packed_matrix_that_no_layer_asked_for_is_refused(sglang):
    config = config_for({}, "b.o_proj", "lm_head", "b.experts.3.w1")
    linear = layer_of(sglang, "linear", "LinearBase")
    config.get_quant_method(linear, "b.o_proj")
    dense = config.get_quant_method(linear, "b.gate")
    with pytest.raises(
        UsageError, match=r"'b\.experts\.3\.w1' and 1 more: .*SGLang's class of this model asks no"
    ):
        dense.process_weights_after_loading(linear)
    config.schemes.asked |= {"b.experts", "lm_head"}
    dense.process_weights_after_loading(linear)


def test_dense_layers_are_left_to_sglang(sglang):
    config = config_for({"lm_head": None})
    linear = layer_of(sglang, "linear", "LinearBase")
    assert type(config.get_quant_method(linear, "b.gate")).__mro__[1].__name__ == "UnquantizedLinearMethod"
    for kind, name in (("VocabParallelEmbedding", "model.embed_tokens"), ("ParallelLMHead", "lm_head")):
        layer = layer_of(sglang, "vocab_parallel_embedding", kind, org_vocab_size=100, embedding_dim=64)
        assert config.get_quant_method(layer, name) is None
    experts = layer_of(sglang, "moe.fused_moe_triton.layer", "FusedMoE")
    assert config.get_quant_method(experts, "b.experts") is None
    assert config.get_quant_method(nn.Module(), "attn") is None


def test_a_packed_embedding_is_the_head_if_it_is_tied(sglang):
    table = "model.embed_tokens"
    config = config_for({table: INT8}, table, ties=True)
    indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=100)
    layer = layer_of(
        sglang,
        "vocab_parallel_embedding",
        "VocabParallelEmbedding",
        shard_indices=indices,
        org_vocab_size=100,
        embedding_dim=64,
        num_added_embeddings=0,
        num_embeddings_per_partition=128,
    )
    method = config.get_quant_method(layer, table)
    method.create_weights(layer, 64, [128], 64, 128, params_dtype=torch.float32)
    packed = absmax_pack(torch.randn(100, 64), INT8)
    load(layer, packed)
    method.process_weights_after_loading(layer)
    x, ids = torch.randn(2, 64), torch.tensor([[0, 35], [7, 7]])
    with torch.no_grad():
        logits = method.apply(layer, x)
        assert_equal(method.embedding(layer, ids), packed.dequantize()[ids])
    torch.testing.assert_close(logits[:, :100], x @ packed.dequantize().T, rtol=1e-4, atol=1e-4)
    assert logits.shape == (2, 128)


def experts_of(sglang: dict[str, Any], **runner: Any) -> Any:
    """A layer of two experts, H 64 and I 32, as SGLang builds it."""
    plain = dict.fromkeys(
        ("gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "swiglu_limit", "routed_scaling_factor")
    )
    plain |= {
        "apply_router_weight_on_input": False,
        "is_gated": True,
        "activation": "silu",
        "no_combine": False,
    }
    return layer_of(
        sglang,
        "moe.fused_moe_triton.layer",
        "FusedMoE",
        moe_runner_config=SimpleNamespace(**{**plain, "num_fused_shared_experts": 0, **runner}),
        moe_tp_rank=0,
        moe_tp_size=1,
    )


def created(config: Any, layer: Any, **options: Any) -> Any:
    def loader(param: Any, loaded: torch.Tensor, name: str, shard_id: str, expert_id: int) -> None:
        # Each rank's share of the experts, as SGLang's own loader finds it.
        layer._weight_loader_impl(
            param=param, loaded_weight=loaded, weight_name=name, shard_id=shard_id, expert_id=expert_id
        )

    method = config.get_quant_method(layer, "model.layers.0.mlp.experts")
    method.create_weights(layer, 2, 64, 32, torch.float32, weight_loader=loader, **options)
    return method


def test_experts_are_loaded_by_sglangs_names_and_leave_out_those_of_other_ranks(sglang):
    prefix = "model.layers.0.mlp.experts"
    modules: dict[str, Scheme | None] = {f"{prefix}.down_proj": INT8}
    config = config_for(modules, f"{prefix}.0.gate_proj", kind="qwen3_moe")
    layer = experts_of(sglang)
    method = created(config, layer)
    torch.manual_seed(0)
    dense: dict[str, list[torch.Tensor]] = {"w1": [], "w3": [], "w2": []}
    for expert in range(2):
        for shard, (rows, columns) in {"w1": (32, 64), "w3": (32, 64), "w2": (64, 32)}.items():
            packed = absmax_pack(torch.randn(rows, columns), INT8 if shard == "w2" else INT4)
            dense[shard].append(packed.dequantize())
            for entry, tensor in file_entries(packed, "quantkit").items():
                name = ("w2_" if shard == "w2" else "w13_") + entry
                parameter = getattr(layer, name)
                parameter.weight_loader(
                    parameter, tensor, f"{prefix}.{name}", shard_id=shard, expert_id=expert
                )
    method.process_weights_after_loading(layer)
    x, ids, weights = torch.randn(3, 64), torch.tensor([[0, 1], [1, -1], [-1, 0]]), torch.rand(3, 2)
    top = SimpleNamespace(topk_weights=weights, topk_ids=ids.int())
    with torch.no_grad():
        y = method.apply(layer, SimpleNamespace(hidden_states=x, topk_output=top)).hidden_states
    expected = torch.zeros(3, 64)
    for token, chosen in enumerate(ids.tolist()):
        for expert, weight in zip(chosen, weights[token], strict=True):
            if expert >= 0:
                gate, up = dense["w1"][expert] @ x[token], dense["w3"][expert] @ x[token]
                expected[token] += weight * (dense["w2"][expert] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("runner", "options", "what"),
    [
        ({"activation": "gelu"}, {}, "the activation 'gelu'"),
        ({"gemm1_alpha": 1.7}, {}, "limits or factors of the activation"),
        ({"routed_scaling_factor": 2.5}, {}, "a factor of their sum"),
        ({"num_fused_shared_experts": 1}, {}, "shared experts among them"),
        ({}, {"with_bias": True}, "biases"),
    ],
)
def test_experts_that_quantkit_would_compute_otherwise_are_refused(sglang, runner, options, what):
    prefix = "model.layers.0.mlp.experts"
    config = config_for({}, f"{prefix}.0.gate_proj", kind="qwen3_moe")
    with pytest.raises(UsageError, match=f"quantkit's plug-in has no experts with {what}"):
        created(config, experts_of(sglang, **runner), **options)

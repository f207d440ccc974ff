"""The plug-in on stubs of vLLM's classes; `tests/engines/run.py` runs it in vLLM."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.errors import CheckpointError, EnvironmentProblem, UsageError
from quantkit.packing.schemes import Scheme

from ...support.compare import assert_equal
from ...test_import import imported_by
from ...tiny.packed import SCHEMES, absmax_pack, config_of
from ..serving.test_fused_linear import file_entries

INT4, INT8 = SCHEMES["int4"], SCHEMES["int8"]
LAYERS = "vllm.model_executor.layers"
#: Classes of vLLM that the plug-in imports, by module.
NAMES = {
    f"{LAYERS}.quantization.base_config": ("QuantizationConfig", "QuantizeMethodBase"),
    f"{LAYERS}.fused_moe": ("RoutedExperts",),
    f"{LAYERS}.fused_moe.fused_moe_method_base": ("FusedMoEMethodBase",),
    f"{LAYERS}.linear": ("LinearBase", "LinearMethodBase", "UnquantizedLinearMethod"),
    f"{LAYERS}.vocab_parallel_embedding": ("VocabParallelEmbedding",),
}
CONFIGS, UTILS = "vllm.transformers_utils.config", "vllm.model_executor.models.utils"
VLLM, LOADER = "vllm.config", "vllm.model_executor.model_loader.base_loader"
OWN = ("config", "methods", "unasked")


class WeightsMapper:
    """Stub of vLLM's renaming of tensors."""

    def __init__(self, orig_to_new_suffix: Any = None) -> None:
        self.orig_to_new_suffix = orig_to_new_suffix or {}

    def __or__(self, other: "WeightsMapper") -> "WeightsMapper":
        return WeightsMapper({**self.orig_to_new_suffix, **other.orig_to_new_suffix})


def modules_of_vllm() -> dict[str, ModuleType]:
    found: dict[str, ModuleType] = {}
    others = {CONFIGS: (), UTILS: ("PPMissingLayer", "StageMissingLayer"), VLLM: (), LOADER: ()}
    for name, classes in {**NAMES, **others}.items():
        parents = name.split(".")
        for length in range(1, len(parents) + 1):
            module = found.setdefault(".".join(parents[:length]), ModuleType(".".join(parents[:length])))
            if length > 1:
                setattr(found[".".join(parents[: length - 1])], parents[length - 1], module)
        for one in classes:
            base = object if one.endswith(("Config", "Method", "MethodBase")) else nn.Module
            setattr(found[name], one, type(one, (base,), {}))
    heads: Any = found[f"{LAYERS}.vocab_parallel_embedding"]
    heads.ParallelLMHead = type("ParallelLMHead", (heads.VocabParallelEmbedding,), {})
    config: Any = found[f"{LAYERS}.quantization.base_config"]
    config.QuantizationConfig.__init__ = lambda self: setattr(self, "packed_modules_mapping", {})
    config.QuantizationConfig.get_cache_scale_mapper = staticmethod(WeightsMapper)
    found[f"{UTILS}"].WeightsMapper = WeightsMapper  # type: ignore[attr-defined]
    found[VLLM].get_current_vllm_config_or_none = lambda: None  # type: ignore[attr-defined]
    found[LOADER].initialize_model = lambda vllm_config, model_config=None: vllm_config.build()  # type: ignore[attr-defined]
    quantization: Any = found[f"{LAYERS}.quantization"]
    quantization.QUANTIZATION_METHODS = []

    def register_quantization_config(name: str) -> Any:
        return lambda cls: quantization.QUANTIZATION_METHODS.append(name) or cls

    quantization.register_quantization_config = register_quantization_config
    return found


@pytest.fixture
def vllm(monkeypatch):
    """Stubs of vLLM in `sys.modules`, and modules of the plug-in that import them anew."""
    stubs = modules_of_vllm()
    for name, module in stubs.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in OWN:
        monkeypatch.delitem(sys.modules, f"quantkit.runtime.vllm.{name}", raising=False)
    yield stubs
    for name in OWN:
        sys.modules.pop(f"quantkit.runtime.vllm.{name}", None)


def layer_of(vllm: dict[str, Any], place: str, kind: str, **attributes: Any) -> Any:
    layer = getattr(vllm[f"{LAYERS}.{place}"], kind)()
    for name, value in {"tp_rank": 0, "params_dtype": torch.float32, **attributes}.items():
        setattr(layer, name, value)
    return layer


def config_for(
    modules: dict[str, Scheme | None],
    *stored: str,
    default: Scheme | None = INT4,
    architecture: Any = None,
) -> Any:
    """The plug-in's config of a checkpoint whose files have the packed matrices `stored`."""
    from quantkit.runtime.vllm.config import QuantkitConfig

    section = QuantizationConfig("quantkit", default, modules).to_dict()
    made = QuantkitConfig.from_config(section)
    configs: Any = sys.modules[CONFIGS]
    configs.get_safetensors_params_metadata = lambda name, revision: {
        f"{one}.weight_scale": 0 for one in stored
    }
    made.maybe_update_config("nowhere", hf_config=architecture)
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return made


def load(layer: Any, packed: Any, *shard: Any) -> None:
    for entry, tensor in file_entries(packed, "quantkit").items():
        parameter = getattr(layer, entry)
        parameter.weight_loader(parameter, tensor, *shard)


def test_the_entry_point_imports_nothing_heavy():
    modules = imported_by("import quantkit.runtime.vllm.register")
    assert not modules & {"torch", "transformers", "vllm"}


def test_vllm_learns_the_method_once(vllm):
    from quantkit.runtime.vllm.register import register

    register()
    register()
    assert vllm[f"{LAYERS}.quantization"].QUANTIZATION_METHODS == ["quantkit"]


def test_a_vllm_that_moved_its_classes_is_one_error_naming_versions(vllm):
    from quantkit.runtime.vllm.register import register

    del vllm[f"{LAYERS}.linear"].LinearBase
    config = pytest.importorskip("quantkit.runtime.vllm.config")
    expected = (
        r"tried with vLLM 0\.26\.0 on .* a CPU and does not fit vLLM .*: cannot import name 'LinearBase'"
    )
    with pytest.raises(EnvironmentProblem, match=expected):
        config.QuantkitConfig.from_config({})
    del vllm[f"{LAYERS}.quantization"].register_quantization_config
    with pytest.warns(UserWarning, match=r"was tried with vLLM 0\.26\.0 .*register_quantization_config"):
        register()


def test_a_compressed_tensors_checkpoint_is_taken_over_only_when_asked(vllm):
    config = type(config_for({}))
    assert config.override_quantization_method({"quantkit": {}}, None) is None
    assert config.override_quantization_method({}, "quantkit") is None
    assert config.override_quantization_method({"quantkit": {}}, "quantkit", hf_config=None) == "quantkit"


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (2, 2)])
def test_q_k_and_v_of_different_schemes_are_one_layer_on_each_rank(vllm, ranks, replicas):
    config = config_for({"b.q_proj": INT8, "b.k_proj": None}, "b.q_proj", "b.v_proj")
    parts = {"q": ("int8", 128), "k": (None, 64), "v": ("int4", 64)}
    torch.manual_seed(0)
    weights = {shard: torch.randn(rows, 64) for shard, (_, rows) in parts.items()}
    x, ys = torch.randn(3, 64), []
    for rank in range(ranks):
        layer = layer_of(vllm, "linear", "LinearBase", tp_rank=rank, num_kv_head_replicas=replicas)
        method = config.get_quant_method(layer, "b.qkv_proj")
        sizes = [128 // ranks, 64 * replicas // ranks, 64 * replicas // ranks]
        method.create_weights(layer, 64, sizes, 64, sum(sizes) * ranks, torch.float32, weight_loader=None)
        dense = []
        for shard, (name, rows) in parts.items():
            weight, share = weights[shard], rank if shard == "q" else rank // replicas
            if name is None:
                layer.weight.weight_loader(layer.weight, weight, shard)
            else:
                packed = absmax_pack(weight, SCHEMES[name])
                load(layer, packed, shard)
                weight = packed.dequantize()
            count = rows // ranks * (1 if shard == "q" else replicas)
            dense.append(weight[share * count : (share + 1) * count])
        method.process_weights_after_loading(layer)
        with torch.no_grad():
            ys.append((method.apply(layer, x), x @ torch.cat(dense).T))
    for y, expected in ys:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


def test_a_linear_cut_along_k_adds_up(vllm):
    packed, x = absmax_pack(torch.randn(48, 128), INT4), torch.randn(3, 128)
    total = torch.zeros(3, 48)
    for rank in range(2):
        layer = layer_of(vllm, "linear", "LinearBase", tp_rank=rank)
        method = config_for({}, "b.o_proj").get_quant_method(layer, "b.o_proj")
        method.create_weights(layer, 64, [48], 128, 48, torch.float32)
        load(layer, packed)
        method.process_weights_after_loading(layer)
        with torch.no_grad():
            total += method.apply(layer, x[:, 64 * rank : 64 * rank + 64])
    torch.testing.assert_close(total, x @ packed.dequantize().T, rtol=1e-4, atol=1e-4)


def test_matrices_that_the_file_holds_as_one_are_cut_one_by_one(vllm):
    packed = absmax_pack(torch.randn(64, 64), INT8)
    config = config_for({}, "b.gate_up_proj", default=INT8)
    config.packed_modules_mapping = {}
    layer = layer_of(vllm, "linear", "LinearBase", tp_rank=1)
    method = config.get_quant_method(layer, "b.gate_up_proj")
    method.create_weights(layer, 64, [16, 16], 64, 64, torch.float32)
    load(layer, packed)
    method.process_weights_after_loading(layer)
    x, whole = torch.randn(2, 64), packed.dequantize()
    with torch.no_grad():
        expected = x @ torch.cat([whole[16:32], whole[48:]]).T
        torch.testing.assert_close(method.apply(layer, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("listed", "stored"),
    [
        ({}, ("q_proj", "k_proj", "v_proj")),
        ({"qkv_proj": ["q_proj", "k_proj", "v_proj"]}, ("qkv_proj",)),
        ({"qkv_proj": ["query", "key", "value"]}, ("query", "key", "value")),
    ],
)
def test_a_fused_layer_is_made_of_what_the_file_holds(vllm, listed, stored):
    config = config_for({}, *(f"b.{one}" for one in stored))
    assert config.schemes.linears("b.qkv_proj", listed) == [(f"b.{one}", INT4) for one in stored]


def test_rows_that_vllm_permutes_by_output_dim_say_so(vllm):
    config = config_for({}, "b.query_key_value", default=SCHEMES["nvfp4"])
    layer = layer_of(vllm, "linear", "LinearBase")
    method = config.get_quant_method(layer, "b.query_key_value")
    method.create_weights(layer, 64, [32], 64, 32, torch.float32)
    has = {
        name: hasattr(parameter, "output_dim") for name, parameter in layer.named_parameters(recurse=False)
    }
    assert has == {"weight": True, "weight_scale": True, "weight_global_scale": False, "weight_shape": False}


def model_of(vllm: dict[str, Any], config: Any, *asked: str, runner: str = "generate") -> Any:
    """Build as vLLM does a model whose layers `asked` ask `config`; its head is on another rank."""
    model = nn.Module()
    model.lm_head = vllm[UTILS].PPMissingLayer()

    def build() -> nn.Module:
        for name in asked:
            config.get_quant_method(layer_of(vllm, "linear", "LinearBase"), name)
        return model

    made = SimpleNamespace(quant_config=config, build=build, model_config=SimpleNamespace(runner_type=runner))
    assert vllm[LOADER].initialize_model(vllm_config=made) is model
    return model


@pytest.mark.parametrize("left_out", ["l.0.mixer.in_proj", "embed_tokens"])
def test_a_packed_matrix_about_which_vllm_asks_no_plug_in_is_refused(vllm, left_out):
    # Nothing of block 7 is built: it is on another rank, or for further tokens.
    config = config_for({}, "l.0.o_proj", left_out, "l.7.o_proj", "lm_head")
    expected = rf"^'{left_out}': packed in the checkpoint, but vLLM's class of this model asks no plug-in"
    with pytest.raises(UsageError, match=expected):
        model_of(vllm, config, "l.0.o_proj")
    model_of(vllm, config, "l.0.o_proj", left_out)
    # A draft model has a part of the layers.
    model_of(vllm, config, "l.0.o_proj", runner="draft")


def test_layers_that_a_class_makes_without_a_config_ask_it(vllm):
    class LinearBase(nn.Module):
        def __init__(self, size: int, quant_config: Any = None, prefix: str = "") -> None:
            super().__init__()
            self.asked = quant_config

    layers: Any = vllm[f"{LAYERS}.linear"]
    layers.LinearBase = LinearBase
    config = config_for({}, "b.o_proj")
    assert LinearBase(8, prefix="b.o_proj").asked is None
    for quant_config, expected in ((config, config), (object(), None), (None, None)):
        current = SimpleNamespace(quant_config=quant_config)
        sys.modules["quantkit.runtime.vllm.unasked"].get_current_vllm_config_or_none = lambda c=current: c  # type: ignore[attr-defined]
        assert LinearBase(8, prefix="b.o_proj").asked is expected
        assert LinearBase(8, "given").asked == "given"
    init = LinearBase.__init__
    config_for({})
    assert LinearBase.__init__ is init


def test_shapes_of_packed_matrices_are_not_loaded(vllm):
    config = config_for({}, "l.0.o_proj")
    suffixes = config.get_cache_scale_mapper().orig_to_new_suffix
    assert suffixes == {".weight_shape": None}


def test_a_layer_of_another_number_of_matrices_is_refused(vllm):
    layer = layer_of(vllm, "linear", "LinearBase")
    method = config_for({}, "b.q_proj").get_quant_method(layer, "b.qkv_proj")
    with pytest.raises(UsageError, match="made of 2 matrices, and the checkpoint has 3 for it"):
        method.create_weights(layer, 64, [64, 64], 64, 128, torch.float32)


def test_dense_layers_are_left_to_vllm(vllm):
    config = config_for({"b.o_proj": None, "lm_head": None})
    # A router is no linear to transformers, so the config does not name it.
    for name in ("b.o_proj", "b.gate"):
        method = config.get_quant_method(layer_of(vllm, "linear", "LinearBase"), name)
        assert type(method).__name__ == "UnquantizedLinearMethod"
    embeddings = "vocab_parallel_embedding"
    # The default is of linears; an embedding is packed only if it is named.
    for kind, name in (("VocabParallelEmbedding", ""), ("ParallelLMHead", "lm_head")):
        layer = layer_of(vllm, embeddings, kind, **vocabulary(100, 0, 100, 128))
        assert config.get_quant_method(layer, name) is None
    assert config.get_quant_method(nn.Module(), "attn") is None


def vocabulary(rows: int, start: int, stop: int, padded: int) -> dict[str, Any]:
    indices = SimpleNamespace(org_vocab_start_index=start, org_vocab_end_index=stop)
    return {
        "shard_indices": indices,
        "org_vocab_size": rows,
        "embedding_dim": 64,
        "num_added_embeddings": 0,
        "num_embeddings_per_partition": padded,
    }


def test_an_embedding_of_another_shape_without_a_name_is_dense(vllm):
    architecture = config_of("llama", architectures=["LlamaForCausalLM"], vocab_size=100)
    config = config_for({"model.embed_tokens": INT8}, architecture=architecture)
    positions = layer_of(
        vllm, "vocab_parallel_embedding", "VocabParallelEmbedding", **vocabulary(64, 0, 64, 64)
    )
    assert config.get_quant_method(positions, "") is None


def test_a_packed_embedding_without_a_name_is_the_input_embedding_and_its_tied_head_uses_it(vllm):
    table = "model.embed_tokens"
    architecture = config_of("llama", architectures=["LlamaForCausalLM"], vocab_size=100)
    config = config_for({table: INT8, "lm_head": INT8}, table, architecture=architecture)
    embedding, head = (
        layer_of(vllm, "vocab_parallel_embedding", kind, **vocabulary(100, 64, 100, 64))
        for kind in ("VocabParallelEmbedding", "ParallelLMHead")
    )
    for layer, name in ((embedding, ""), (head, "lm_head")):
        layer.quant_method = config.get_quant_method(layer, name)
        layer.quant_method.create_weights(layer, 64, [64], 64, 128, torch.float32)
    assert embedding.quant_method.name == table
    assert head.quant_method.tie_weights(head, embedding) is head
    assert not hasattr(head, "weight")
    packed = absmax_pack(torch.randn(100, 64), INT8)
    load(embedding, packed)
    for layer in (embedding, head):
        layer.quant_method.process_weights_after_loading(layer)
    x, ids = torch.randn(2, 64), torch.tensor([[0, 35], [7, 7]])
    with torch.no_grad():
        logits = head.quant_method.apply(head, x)
        assert_equal(embedding.quant_method.embedding(embedding, ids), packed.dequantize()[64:][ids])
    torch.testing.assert_close(logits[:, :36], x @ packed.dequantize()[64:].T, rtol=1e-4, atol=1e-4)
    assert logits.shape == (2, 64) and not logits[:, 36:].any()


def test_a_head_that_is_tied_to_a_dense_embedding_and_added_rows_are_refused(vllm):
    config = config_for({"lm_head": INT8})
    sizes = vocabulary(100, 0, 100, 128)
    head = layer_of(vllm, "vocab_parallel_embedding", "ParallelLMHead", **sizes)
    method = config.get_quant_method(head, "lm_head")
    with pytest.raises(CheckpointError, match=r"'lm_head' is packed, but config\.json ties its weight"):
        method.tie_weights(head, SimpleNamespace(quant_method=None))
    head.num_added_embeddings = 1
    with pytest.raises(UsageError, match="'lm_head' is packed, which has no rows that are added"):
        method.create_weights(head, 64, [128], 64, 128, torch.float32)


def test_experts_have_the_names_that_transformers_gives_them(vllm):
    modules = {"model.layers.0.mlp.experts.down_proj": INT8}
    architecture = config_of("mixtral", architectures=["MixtralForCausalLM"])
    config = config_for(modules, "model.layers.0.block_sparse_moe.experts.0.w1", architecture=architecture)
    assert config.schemes.experts("model.layers.1.block_sparse_moe.experts", ("w1", "w3", "w2")) == [
        ("model.layers.1.block_sparse_moe.experts", None)
    ]
    # A layer may leave the names to the loader of its model.
    for named in (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")):
        assert config.schemes.experts("model.layers.0.block_sparse_moe.experts", named) == [
            ("model.layers.0.mlp.experts.gate_up_proj", INT4),
            ("model.layers.0.mlp.experts.gate_up_proj", INT4),
            ("model.layers.0.mlp.experts.down_proj", INT8),
        ]

"""Tiny random models of transformers' classes, and what quantkit makes of each.

    python -m tests.quantization.matrix RESULTS.json [CLASS ...]

quantizes each class of `names()` in the ways of `COLUMNS`, loads the result as that class, and compares its
outputs with those of the dense model that has what `unpacked` reads from the file, without quantkit, for each
packed matrix. Each column of a class is right, or refused and why. Nothing else may happen. Results are
written after each class; those that the file has are not made again, unless their class is named.

    python -m tests.quantization.matrix summary    # the table of README.md, from benchmarks/results/classes
"""

import contextlib
import copy
import inspect
import io
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

import quantkit
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import QuantkitError
from quantkit.quantization.blockwise.calibration_data import read_samples

ROOT = Path(__file__).parents[2]
#: Ways of quantizing each class. Blocks of all classes run on 16 samples of 16 bytes of the bundled text.
INT4: dict[str, Any] = {"format": "int4", "group_size": 32}
COLUMNS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "int4": INT4,
    "gptq": {**INT4, "method": "gptq", "calibration": CalibrationOptions(samples=16, length=16)},
}

#: Mappings whose classes are tried, and of how many inputs the tasks are.
MAPPINGS = (
    *(
        "CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "MULTIMODAL_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "MASKED_LM",
    ),
    *(
        "SEQUENCE_CLASSIFICATION",
        "TEXT_ENCODING",
        "RETRIEVAL",
        "CTC",
        "AUDIO_CLASSIFICATION",
        "IMAGE_CLASSIFICATION",
    ),
)

VOCAB = 272
#: Sizes of every config that has a field of the name. Heads are 4 of 16.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), VOCAB),
    "unpadded_vocab_size": VOCAB,
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 64
    ),
    **dict.fromkeys(
        ("word_embed_proj_dim", "attention_hidden_size", "out_hidden_size", "projection_dim"), 64
    ),
    **dict.fromkeys(("projector_hidden_size", "output_dim", "vision_output_dim", "d_embed", "out_dim"), 64),
    **dict.fromkeys(("n_layer", "num_hidden_layers", "n_layers", "num_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers", "vision_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "d_kv", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "kv_channels"), 16
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 96
    ),
    **dict.fromkeys(("ffn_hidden_size", "hidden_dim", "d_inner", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "dim_ff", "mlp_hidden_size"), 96),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 48
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "n_groups"), 1),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "context_length", "max_seq_len"), 128
    ),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "max_sequence_length"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("image_size",), 28),
    **dict.fromkeys(("text_hidden_size", "audio_hidden_size"), 64),
    **dict.fromkeys(("temporal_patch_size", "video_temporal_patch_size"), 2),
    **dict.fromkeys(("patch_size", "spatial_patch_size"), 14),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 16),
    "num_mel_bins": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LARGEST = 20_000_000
#: What some config classes need besides, by the name of the config class.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TEXTS = (
    *(
        "Qwen2VLTextConfig",
        "Qwen2_5_VLTextConfig",
        "Glm4vTextConfig",
        "Glm4vMoeTextConfig",
        "Glm46VTextConfig",
    ),
    *("GlmOcrTextConfig", "PaddleOCRTextConfig", "Qwen2_5OmniTextConfig"),
)
MORE: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": _ROPE, "num_key_value_heads": 4} for name in _TEXTS},
    "BambaConfig": {"attn_layer_indices": [1]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128},
    "Gemma3nTextConfig": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    },
    "LongcatFlashConfig": {"head_dim": 8},
    "Qwen4ExpTextConfig": {
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    },
    "CohereCompassTextConfig": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
    },
    "ZambaConfig": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "Zamba2Config": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
    "Ernie4_5_VLMoeTextConfig": {
        **{"rope_parameters": _ROPE, "num_key_value_heads": 4, "moe_intermediate_size": [48, 48]},
    },
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MuseSparkVisionConfig": {"num_hidden_layers": 4},
    "EsmcConfig": {"num_key_value_heads": 4},
    "LukeConfig": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "PerceiverConfig": {"d_latents": 64, "num_latents": 8, "num_blocks": 1},
    "ReformerConfig": {"is_decoder": True},
    "XmodConfig": {"default_language": "en_XX"},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "MobileBertConfig": {"embedding_size": 32},
}


def names() -> list[str]:
    """The classes of `MAPPINGS`, each once, without those of the encoders of timm."""
    found: dict[str, None] = {}
    for mapping in MAPPINGS:
        table = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for value in table.values():
            found.update(dict.fromkeys([value] if isinstance(value, str) else value))
    return [name for name in found if hasattr(transformers, name)]


def tiny_config(cls: Any) -> Any:
    """A small config of class `cls`, and of each of its parts."""
    fields = inspect.signature(cls.__init__).parameters
    default = cls()
    fixed = default.to_dict()
    # Some have a list of sizes, one per stage, where others have one.
    keywords = {
        name: value
        for name, value in SIZES.items()
        if name in fields and not isinstance(fixed.get(name), list | tuple)
    }
    for name in getattr(cls, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, transformers.PreTrainedConfig):
            keywords[name] = tiny_config(type(part)).to_dict()
    keywords.update(MORE.get(cls.__name__, {}))
    if "kv_lora_rank" in fields:
        keywords["num_key_value_heads"] = keywords["num_attention_heads"]
    rope = {**(fixed.get("rope_parameters") or {}), **keywords.get("rope_parameters", {})}
    if "mrope_section" in rope and "rope_parameters" in fields:
        part = rope.get("partial_rotary_factor") or fixed.get("partial_rotary_factor") or 1
        half = SIZES["qk_rope_head_dim"] if "qk_rope_head_dim" in fields else int(part * SIZES["head_dim"])
        third = 3 * half // 16
        keywords["rope_parameters"] = {**rope, "mrope_section": [third, third, half // 2 - 2 * third]}
    kinds = {} if "num_hidden_layers" in MORE.get(cls.__name__, {}) else _kinds_of_layers(default, fields)
    return cls(**{**keywords, **kinds})


def _kinds_of_layers(default: Any, fields: Any) -> dict[str, Any]:
    """A layer of each kind that the default config has."""
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if "layer_types" not in fields or len(kinds) < 2:
        return {}
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def tiny_model(name: str) -> Any:
    """A random model of class `name` whose outputs differ from token to token."""
    cls = getattr(transformers, name)
    config = tiny_config(cls.config_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} weights; SIZES does not know what makes it large")
    torch.manual_seed(0)
    model = cls(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.std() < 0.1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
                )
    return model


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Tokens, sounds or images that a model takes: its main input, and tokens for a decoder."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 200, (1, 12), generator=generator)
    takes, config = inspect.signature(model.forward).parameters, model.config
    main = model.main_input_name
    inputs = {}
    if main == "pixel_values":
        inputs[main] = torch.randn(1, getattr(config, "num_channels", 3), 28, 28, generator=generator)
    elif main == "input_features":
        inputs[main] = torch.randn(1, getattr(config, "num_mel_bins", 16), 128, generator=generator)
    elif main == "input_values":
        inputs[main] = torch.randn(1, 4000, generator=generator)
    else:
        inputs["input_ids"] = ids
        if "pixel_values" in takes and not model.can_generate():
            inputs["pixel_values"] = torch.randn(1, 3, 28, 28, generator=generator)
    # Classifiers shift the tokens of the encoder.
    classifies = type(model).__name__.endswith("SequenceClassification")
    if classifies:
        ids[:, -1] = SIZES["eos_token_id"]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes and not classifies:
        inputs["decoder_input_ids"] = ids[:, :8]
    return inputs


def save_source(model: Any, directory: Path) -> None:
    """Write a model, and a tokenizer that gives a token per byte."""
    model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)


def outputs(model: Any) -> torch.Tensor:
    """The first output of a model for `inputs_of` it."""
    with torch.no_grad():
        return model(**inputs_of(model))[0].float()


def unpacked(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The matrices of a pack-quantized checkpoint of symmetric integers, read by the published format.

    Codes of b bits are stored with 2^(b - 1) added, the first in the lowest bits of an int32.
    """
    found = {}
    for name, scale in tensors.items():
        stem = name.removesuffix("_scale")
        if name.endswith(".weight_scale"):
            # Where only quantkit knows the name, its container has the words under that of the weight.
            words = tensors.get(f"{stem}_packed", tensors.get(stem))
            found[stem] = words, scale, tensors[f"{stem}_shape"].tolist()[1]
    # A row of few columns has as many words of either width.
    bits = next(
        b
        for b in (4, 8)
        if all(words.shape[1] == -(-columns * b // 32) for words, _, columns in found.values())
    )
    fields = torch.arange(0, 32, bits)
    for stem, (words, scale, columns) in found.items():
        codes = (words.to(torch.int64)[..., None] >> fields) & (2**bits - 1)
        codes = codes.flatten(1)[:, :columns] - 2 ** (bits - 1)
        # The last of the groups may be shorter.
        size = columns if scale.shape[1] == 1 else INT4["group_size"]
        yield stem, codes.float() * scale.float().repeat_interleave(size, 1)[:, :columns]


def _places(name: str, tensors: dict[str, torch.Tensor]) -> Iterator[torch.Tensor]:
    """Views of `tensors` that may be the matrix `name`, of its own or in one tensor with all experts'."""
    if name in tensors:
        yield from (tensors[name], tensors[name].T) if tensors[name].ndim == 2 else ()
        return
    stem, _, rest = name.rpartition(".experts.")
    expert = rest.partition(".")[0]
    for of, tensor in tensors.items():
        if not expert.isdigit() or not of.startswith(f"{stem}.") or tensor.ndim != 3:
            continue
        if len(tensor) > int(expert):
            for one in (tensor[int(expert)], tensor[int(expert)].T):
                half = len(one) // 2
                yield from (one, one[:half], one[half:], one[::2], one[1::2])


def put(matrices: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put matrices, each near the original, in their places in `tensors`; return those without a place."""
    left = {}
    for name, matrix in matrices.items():
        places = [one for one in _places(name, tensors) if one.shape == matrix.shape]
        errors = [float((matrix - one.float()).norm() / one.float().norm()) for one in places]
        if not errors:
            left[name] = matrix
            continue
        assert min(errors) < 0.3, f"{name} is {min(errors):.2f} of itself away from the original"
        places[errors.index(min(errors))].copy_(matrix)
    return left


def rounded(source: Path, packed: Path, to: Path) -> dict[str, torch.Tensor]:
    """Write `source` with the matrices of `packed` in their places; return those that the files have not.

    They are there under their names, or in one tensor with those of all experts.
    """
    to.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    left = put(dict(unpacked(load_file(packed / "model.safetensors"))), tensors)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return left


def _linear_weights(model: Any) -> int:
    """Weights of all linears and stacks of experts of a model, but for its head."""
    head = None
    with contextlib.suppress(Exception):
        head = model.get_output_embeddings()
    linears = {
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    experts = {one for name, one in model.named_parameters() if ".experts." in name and one.ndim == 3}
    return sum(one.numel() for one in linears | experts)


def _generated(model: Any) -> list[int] | None:
    """Tokens that a model generates; None if it does not by a prompt alone."""
    if not model.can_generate():
        return None
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 1}
    torch.manual_seed(0)
    made = model.generate(**inputs_of(model), **options)
    return made.flatten().tolist() if isinstance(made, torch.Tensor) else None


@torch.no_grad()
def _gain(cls: Any, directory: Path, options: CalibrationOptions) -> float | None:
    """Squared errors of the outputs of all linears with gptq's weights, over those with mse's.

    By the inputs that they have in the original, on the calibration data. None if none of them differ.
    """
    source, *twins = (
        cls.from_pretrained(directory / one).eval() for one in ("source", "rounded-int4", "rounded-gptq")
    )
    sums = [0.0, 0.0]

    def see(name: str) -> Any:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
            changes = [twin.get_submodule(name).weight - module.weight for twin in twins]
            size = (inputs[0] @ (module.weight if isinstance(module, Conv1D) else module.weight.T)).norm()
            if size > 0 and not torch.equal(*changes):
                for at, change in enumerate(changes):
                    error = inputs[0] @ (change if isinstance(module, Conv1D) else change.T)
                    sums[at] += float((error.norm() / size) ** 2)

        return hook

    for name, module in source.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            module.register_forward_hook(see(name))
    tokens = read_samples(Checkpoint.open(directory / "source"), options, VOCAB).tokens
    takes = inspect.signature(source.forward).parameters
    inputs = {name: tokens for name in ("input_ids", "decoder_input_ids") if name in takes}
    source(**inputs, **({"use_cache": False} if "use_cache" in takes else {}))
    return sums[1] / sums[0] if sums[0] else None


def check(name: str, directory: Path, column: str, **options: Any) -> dict[str, Any]:
    """Quantize the model of class `name` in `directory`, and compare; returns what was found."""
    source, out, dense = directory / "source", directory / column, directory / f"rounded-{column}"
    cls = getattr(transformers, name)
    try:
        result = quantkit.quantize(source, out, device="cpu", check=True, **options)
    except QuantkitError as error:
        # What a run leaves shows whether it was refused before any work.
        return {"result": "refused", "why": str(error).replace(str(source), "MODEL"), "late": out.exists()}
    left = rounded(source, out, dense)
    model, info = cls.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    twin = cls.from_pretrained(dense).eval()
    with torch.no_grad():
        # Those that the model has, and the file in another form.
        left = put(left, dict(twin.named_parameters()))
    found, expected = outputs(model.eval()), outputs(twin)
    assert bool(torch.isfinite(expected).all())
    error = float((found - expected).norm() / expected.norm())
    # Matrices without a place in either are compared by their effect only.
    assert error < (0.1 if left else 1e-3), f"outputs differ by {error:.2e}"
    sizes = [matrix.numel() for _, matrix in unpacked(load_file(out / "model.safetensors"))]
    assert sizes
    tokens: list[int] | None = None
    if column == "int8":
        with contextlib.suppress(Exception):
            tokens = _generated(twin)
        assert tokens is None or _generated(model) == tokens, "other tokens are generated"
    share = sum(sizes) / max(1, _linear_weights(twin))
    calibrated = None
    if "calibration" in options and (directory / "rounded-int4").exists():
        plain = dict(unpacked(load_file(directory / "int4" / "model.safetensors")))
        ours = dict(unpacked(load_file(out / "model.safetensors")))
        calibrated = sum(not torch.equal(one, plain[name]) for name, one in ours.items()) / len(ours)
        gain = _gain(cls, directory, options["calibration"])
        assert gain is None or gain < 1, f"calibrated outputs are {gain:.2f} times as far from the original"
    return {
        "result": "right",
        "matrices": len(sizes),
        "share": round(share, 3),
        "error": float(f"{error:.1e}"),
        **({"unknown": len(left)} if left else {}),
        **({} if tokens is None else {"generates": True}),
        **({} if calibrated is None else {"calibrated": round(calibrated, 3)}),
        **({} if calibrated is None or gain is None else {"gain": round(gain, 3)}),
        "readers": list(result.plan.readers),
        **({"warnings": list(result.plan.warnings)} if column == "int8" else {}),
    }


def attempt(name: str, directory: Path, columns: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """`check` each column, or say why no tiny model of the class is made, or which error should not be."""
    try:
        save_source(tiny_model(name), directory / "source")
        load = getattr(transformers, name).from_pretrained
        model, info = load(directory / "source", output_loading_info=True)
        if not torch.equal(outputs(model.eval()), outputs(model)):
            raise ValueError("its outputs are random")
        if info["missing_keys"]:
            raise ValueError(f"transformers cannot read what it wrote: no {min(info['missing_keys'])!r}")
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        return {column: {"result": "not made", "why": why} for column in columns}
    found = {}
    for column, options in columns.items():
        start = time.perf_counter()
        try:
            found[column] = check(name, directory, column, **options)
        except Exception as error:
            frames = "".join(traceback.format_exc().splitlines(keepends=True)[-6:])
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            found[column] = {"result": "WRONG", "why": why, "frames": frames}
        found[column]["seconds"] = round(time.perf_counter() - start, 1)
    return found


STORED = ROOT / "benchmarks" / "results" / "classes" / "matrix.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- generated: classes -->", "<!-- end of generated: classes -->"
#: Lines of the table, by result.
LINES = {
    "right": "packed, with the right outputs",
    "refused": "refused",
    "WRONG": "wrong",
    "not made": "no tiny model that runs, so not tried",
}


def with_summary(page: str) -> str:
    """README.md with the table of the stored results."""
    document = json.loads(STORED.read_text())
    found = list(document["classes"].values())
    versions = " and ".join(f"{name} {version}" for name, version in document["versions"].items())
    rows = [
        [f"of {len(found)} classes, {versions}", "int8", "int4, groups of 32", "the same by gptq"],
        ["---"] * 4,
    ]
    for result, line in LINES.items():
        counts = [sum(one[column]["result"] == result for one in found) for column in COLUMNS]
        rows += [[line, *map(str, counts)]] if any(counts) else []
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n{END}{rest.split(END)[1]}"


def main(results: Path, chosen: list[str]) -> None:
    """Add the results of the chosen classes, or of those that `results` lacks, and count."""
    from benchmarks.machine import commit  # Only a run from the root of the tree has it.

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    known = json.loads(results.read_text())["classes"] if results.exists() else {}
    for name in chosen or [name for name in names() if name not in known]:
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
            known[name] = {"commit": commit(), **attempt(name, Path(directory), COLUMNS)}
        print(name, json.dumps(known[name]), flush=True)
        head = {
            "command": "python -m tests.quantization.matrix benchmarks/results/classes/matrix.json",
            "versions": {one.__name__: one.__version__ for one in (transformers, torch)},
        }
        lines = [f"{json.dumps(one)}: {json.dumps(known[one])}" for one in names() if one in known]
        classes = ",\n".join(lines)
        results.write_text(f'{json.dumps(head)[:-1]}, "classes": {{\n{classes}\n}}}}\n')


if __name__ == "__main__":
    if sys.argv[1:] == ["summary"]:
        README.write_text(with_summary(README.read_text()))
    else:
        main(Path(sys.argv[1]), sys.argv[2:])

"""Tiny random models of transformers' classes, and what quantkit makes of each.

    python -m tests.quantization.matrix RESULTS.json [CLASS ...]

quantizes each class of `names()` in the ways of `COLUMNS`, loads the result as that class, and compares its
outputs with those of the dense model that has what `unpacked` reads from the file, without quantkit, for each
packed matrix. Each column of a class is right, or refused and why. Nothing else may happen. Results are
written after each class; those that the file has are not made again, unless their class is named.
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
from quantkit.errors import QuantkitError

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
    *("GlmOcrTextConfig", "PaddleOCRTextConfig", "Ernie4_5_VLMoeTextConfig"),
)
MORE: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": _ROPE, "num_key_value_heads": 4} for name in _TEXTS},
    "BambaConfig": {"attn_layer_indices": [1]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128},
    "Gemma3nTextConfig": {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4},
    "ReformerConfig": {"is_decoder": True},
    "XmodConfig": {"default_language": "en_XX"},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ZayaConfig": {"num_experts_per_tok": 1},
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
    keywords = {name: value for name, value in SIZES.items() if name in fields}
    parts = getattr(cls, "sub_configs", {})
    default = cls() if parts else None
    for name in parts:
        part = getattr(default, name, None)
        if isinstance(part, transformers.PreTrainedConfig):
            keywords[name] = tiny_config(type(part)).to_dict()
    keywords.update(MORE.get(cls.__name__, {}))
    if "kv_lora_rank" in fields:
        keywords["num_key_value_heads"] = keywords["num_attention_heads"]
    made = cls(**{**keywords, **_kinds_of_layers(cls, fields)})
    rope = getattr(made, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:
        rope["mrope_section"] = [2, 3, 3]
    return made


def _kinds_of_layers(cls: Any, fields: Any) -> dict[str, Any]:
    """A layer of each kind that the default config has."""
    kinds = list(dict.fromkeys(getattr(cls(), "layer_types", None) or ()))
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
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
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
    for name, scale in tensors.items():
        if not name.endswith(".weight_scale"):
            continue
        stem = name.removesuffix("_scale")
        # Where only quantkit knows the name, its container has the words under that of the weight.
        words = tensors.get(f"{stem}_packed", tensors.get(stem))
        columns = tensors[f"{stem}_shape"].tolist()[1]
        bits = next(b for b in (4, 8) if words.shape[1] == -(-columns * b // 32))
        fields = torch.arange(0, 32, bits)
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


def rounded(source: Path, packed: Path, to: Path) -> dict[str, tuple[int, bool]]:
    """Write `source` with the matrices of `packed`, each near the original and in its place.

    Returns of each matrix how many weights it has, and whether the source has it, under its name or in one
    tensor with those of all experts.
    """
    to.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (to / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    originals = {name: tensor.clone() for name, tensor in tensors.items()}
    found = {}
    for name, matrix in unpacked(load_file(packed / "model.safetensors")):
        errors = [
            (float((matrix - one.float()).norm() / one.float().norm()), at)
            for at, one in enumerate(_places(name, originals))
            if one.shape == matrix.shape
        ]
        found[name] = matrix.numel(), bool(errors)
        if errors:
            assert min(errors)[0] < 0.3, f"{name} is {min(errors)[0]:.2f} of itself away from the original"
            list(_places(name, tensors))[min(errors)[1]].copy_(matrix)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return found


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


def check(name: str, directory: Path, column: str, **options: Any) -> dict[str, Any]:
    """Quantize the model of class `name` in `directory`, and compare; returns what was found."""
    source, out, dense = directory / "source", directory / column, directory / f"rounded-{column}"
    cls = getattr(transformers, name)
    try:
        result = quantkit.quantize(source, out, device="cpu", check=True, **options)
    except QuantkitError as error:
        # What a run leaves shows whether it was refused before any work.
        return {"result": "refused", "why": str(error), "late": out.exists()}
    sizes = rounded(source, out, dense)
    model, info = cls.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"], info["missing_keys"]
    twin = cls.from_pretrained(dense).eval()
    found, expected = outputs(model.eval()), outputs(twin)
    assert bool(torch.isfinite(expected).all())
    error = float((found - expected).norm() / expected.norm())
    known = all(is_known for _, is_known in sizes.values())
    # Matrices that the source has in another form are compared by their effect only.
    assert error < (1e-3 if known else 0.1), f"outputs differ by {error:.2e}"
    assert sizes
    tokens: list[int] | None = None
    if column == "int8":
        with contextlib.suppress(Exception):
            tokens = _generated(twin)
        assert tokens is None or _generated(model) == tokens, "other tokens are generated"
    share = sum(size for size, _ in sizes.values()) / max(1, _linear_weights(twin))
    calibrated = None
    if "calibration" in options and (directory / "int4").exists():
        plain = dict(unpacked(load_file(directory / "int4" / "model.safetensors")))
        ours = dict(unpacked(load_file(out / "model.safetensors")))
        calibrated = sum(not torch.equal(one, plain[name]) for name, one in ours.items()) / len(ours)
    return {
        "result": "right",
        "matrices": len(sizes),
        "share": round(share, 3),
        "error": float(f"{error:.1e}"),
        **({} if known else {"unknown": sum(not is_known for _, is_known in sizes.values())}),
        **({} if tokens is None else {"generates": True}),
        **({} if calibrated is None else {"calibrated": round(calibrated, 3)}),
        "readers": list(result.plan.readers),
        "warnings": list(result.plan.warnings),
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


def main(results: Path, chosen: list[str]) -> None:
    """Add the results of the chosen classes, or of those that `results` lacks, and count."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    known = json.loads(results.read_text())["classes"] if results.exists() else {}
    for name in chosen or [name for name in names() if name not in known]:
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stderr(io.StringIO()):
            known[name] = attempt(name, Path(directory), COLUMNS)
        print(name, json.dumps(known[name]), flush=True)
        document = {
            "command": "python -m tests.quantization.matrix benchmarks/results/matrix.json",
            "versions": {one.__name__: one.__version__ for one in (transformers, torch)},
            "classes": {one: known[one] for one in names() if one in known},
        }
        results.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

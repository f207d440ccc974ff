"""Load a packed or dense checkpoint as a transformers model, ready for inference."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from quantkit.checkpoint.source import CONFIG_NAME, Checkpoint
from quantkit.devices import pick_device
from quantkit.errors import CheckpointError, UsageError, first_of
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.memory import enough_memory
from quantkit.model.completeness import lacks
from quantkit.model.hf_files import GENERATION_CONFIG_NAME, explained, read_generation_config, whole_directory
from quantkit.model.model_class import model_class
from quantkit.model.prefixes import wrapper
from quantkit.model.structure import check_layer_counts
from quantkit.model.transformers_version import require_transformers
from quantkit.runtime.transformers.registration import register_plugin

if TYPE_CHECKING:
    from transformers import GenerationMixin, PreTrainedModel

    class LoadedModel(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
        """Type of the result of `load`: a model of transformers, with `generate` if its class has it."""


_LESS = "Free memory on it, or use another device."


def load(
    path: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: torch.dtype | str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: str | Path | None = None,
) -> "LoadedModel":
    """Load the model in `path`, a directory or a hub id; packed weights stay packed.

    Calls `from_pretrained` of the class that `architectures` of config.json names, with arguments checked and
    errors explained. The model is in evaluation mode, with weights repacked for kernels. On one GPU,
    `generate` decodes with a static cache and CUDA graphs unless its arguments say otherwise, also for a
    dense checkpoint.

    `device` "auto" is the first GPU if there is one, else the CPU. `device_map`, `max_memory` and
    `offload_folder` are passed to `from_pretrained`, for a model that does not fit one device. `dtype` is the
    dtype of activations and dense weights: float32, bfloat16 or float16. None and "auto" take it from
    config.json. Scales keep their own dtype. Code in the checkpoint is never run.

    Raises `CheckpointError` for a checkpoint that breaks its format or lacks tensors, `UsageError` for
    contradicting arguments, `EnvironmentProblem` for an unsupported transformers.
    """
    if device_map is not None and str(device) != "auto":
        raise UsageError(
            f"device={str(device)!r} and device_map={device_map!r} contradict each other; give one."
        )
    activations = _activation_dtype(dtype)
    require_transformers()
    directory = whole_directory(path)
    checkpoint = Checkpoint.open(directory)
    check_layer_counts(checkpoint)
    placed = pick_device(device)
    if placed.type == "cuda":
        # CUDA graphs and their model refer to each other, so only the garbage collector frees a former model.
        gc.collect()
    placement: dict[str, Any] = {"device_map": device_map or {"": placed}}
    if max_memory is not None:
        placement["max_memory"] = dict(max_memory)
    if offload_folder is not None:
        placement["offload_folder"] = str(offload_folder)
    with enough_memory(str(path), _LESS), explained(path):
        model: LoadedModel = _from_pretrained(
            directory, checkpoint.config, dtype="auto" if activations is None else activations, **placement
        )
    return model


def load_language_model(path: str | Path, **options: Any) -> Any:
    """Load like `load`; raise `UsageError` for a model that does not predict the next token of a text."""
    model = load(path, **options)
    seq2seq = getattr(model.config, "is_encoder_decoder", False)
    if model.can_generate() and model.main_input_name == "input_ids" and not seq2seq:
        return model
    raise UsageError(
        f"{path} is a {type(model).__name__}, which does not continue a text: there are no next tokens to "
        "generate or to score. Run it in Python: quantkit.load gives the model of transformers."
    )


def load_unfinished(directory: Path, config: Mapping[str, Any], device: torch.device) -> Any:
    """Load the model in `directory` in float32, with `config` in place of a config.json not yet written.

    Quantization uses it to test a checkpoint that it is writing. Raises `CheckpointError` for a checkpoint
    that breaks its format or lacks tensors, `EnvironmentProblem` for too little memory.
    """
    with enough_memory(str(directory), _LESS), explained(directory):
        return _from_pretrained(directory, config, dtype=torch.float32, device_map={"": device})


def _from_pretrained(directory: Path, config: Mapping[str, Any], **options: Any) -> Any:
    """Load the model class that `config` names from `directory`, in evaluation mode.

    `options` are arguments of `from_pretrained`. Registers quantkit with transformers for the whole process,
    and makes the model decode with CUDA graphs. Raises `CheckpointError` for missing tensors.
    """
    register_plugin()
    cls, parsed = model_class(config, directory)
    if config.get("quantization_config") is not None:
        parsed.quantization_config = config["quantization_config"]
    model, info = cls.from_pretrained(
        directory,
        config=parsed,
        generation_config=read_generation_config(directory / GENERATION_CONFIG_NAME, cls),
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    _refuse_incomplete(directory, model, info)
    model.eval()
    from quantkit.runtime.transformers.patches import generation

    # Needed for dense models, which the plug-in does not see.
    generation.apply(model)
    return model


def _activation_dtype(requested: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype `requested`, a dtype or its name; None for None and "auto", which mean config.json's.

    Raises `UsageError` for others than float32, bfloat16 and float16.
    """
    names: dict[object, torch.dtype | None] = {"auto": None, None: None}
    names |= {str(one).removeprefix("torch."): one for one in ACTIVATION_DTYPES}
    names |= {one: one for one in ACTIVATION_DTYPES}
    if requested not in names:
        names_text = ", ".join(map(str, ACTIVATION_DTYPES))
        raise UsageError(f"dtype is {requested!r}; expected {names_text}, or None for that of config.json.")
    return names[requested]


def _refuse_incomplete(directory: Path, model: Any, info: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the checkpoint in `directory` lacks tensors of `model`.

    `info` is the loading info of `from_pretrained`, which only warns and fills in random numbers.
    """
    missing = sorted(info["missing_keys"])
    if not missing:
        return
    checkpoint = Checkpoint.open(directory) if (directory / CONFIG_NAME).is_file() else None
    hidden = {} if checkpoint is None or checkpoint.is_quantized else wrapper(checkpoint)
    if hidden:
        parts = " and ".join(map(repr, hidden.values()))
        raise CheckpointError(
            f"{directory}: the names of its tensors have {parts}, which the model does not. `quantkit "
            "quantize` takes it off. Write a dense copy without: AutoModelForCausalLM.from_pretrained("
            f"{str(directory)!r}, key_mapping={dict.fromkeys(hidden, '')}).save_pretrained(NEW_DIR)."
        )
    parameters = dict(model.named_parameters())
    if checkpoint is not None and not checkpoint.is_quantized and missing[0] in parameters:
        raise lacks(model, [name for name in missing if name in parameters], checkpoint)
    raise CheckpointError(
        f"{directory}: the checkpoint has no tensor for {first_of(map(repr, missing))}. Download it again, "
        "or quantize the model again."
    )

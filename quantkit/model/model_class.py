"""Find the model class of a checkpoint, and build it without weights.

`architectures` of config.json names the class of the files. AutoModelForCausalLM may build only a part of it:
the text model of a vision-language model, the decoder of a speech model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

#: Mappings of transformers from config to generative classes, tried in this order if `architectures` does not
#: help; then all others.
GENERATIVE = (
    "MODEL_FOR_CAUSAL_LM_MAPPING",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
)
ORDER = (*GENERATIVE, "MODEL_FOR_MASKED_LM_MAPPING", "MODEL_MAPPING")

#: Tag with which transformers writes floats that JSON cannot express.
_FLOAT_TAG = "__float__"
_TAGGED_FLOATS = {name: float(name) for name in ("NaN", "Infinity", "-Infinity")}

#: Characters shown of an error of transformers; some list every known class.
_SHOWN = 200


def is_known_type(kind: object) -> bool:
    """Return True if transformers has an architecture of this `model_type`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return isinstance(kind, str) and kind in CONFIG_MAPPING


def model_config(config: Mapping[str, Any], directory: Path) -> Any:
    """Return transformers' config for a config.json, with defaults filled in.

    Raises `CheckpointError` for an unknown model type, or values that transformers refuses.
    """
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    path, kind = directory / "config.json", config.get("model_type")
    if not is_known_type(kind):
        raise CheckpointError(
            f"{path}: 'model_type' is {kind!r}; expected an architecture of transformers {__version__}. "
            f"Check it, or install a transformers that knows the architecture{_without(config)}."
        )
    fields = {k: _with_floats(v) for k, v in config.items() if k not in ("quantization_config", "auto_map")}
    # Some versions of huggingface-hub refuse a config with invalid class names.
    fields["architectures"] = list(named_classes(config)) or None
    try:
        return CONFIG_MAPPING[kind].from_dict(fields)
    except Exception as error:
        raise CheckpointError(
            f"{path}: transformers cannot read it as the config of a {kind!r} ({_short(error)}). Restore the "
            "config.json of the original model."
        ) from error


def model_class(config: Mapping[str, Any], directory: Path) -> tuple[Any, Any]:
    """Return the model class for a config.json, and the config to build it from.

    The class is the first of `architectures` that transformers has for this config. Otherwise it is a class
    for the same purpose, or the first in the mappings `ORDER`. Raises `CheckpointError` if there is none.
    """
    parsed = model_config(config, directory)
    for cls in (_named(name) for name in named_classes(config)):
        fitting = None if cls is None else _config_for(cls, parsed)
        if fitting is not None:
            return cls, fitting
    for mapping in (*_mappings_of(named_classes(config)), *ORDER):
        found = of_mapping(mapping, parsed)
        if found is not None:
            return found
    raise CheckpointError(
        f"{directory / 'config.json'}: 'architectures' is {config.get('architectures')!r}, and transformers "
        f"has no such class of model for {config.get('model_type')!r}. Name one that it "
        f"has{_without(config)}."
    )


def _without(config: Mapping[str, Any]) -> str:
    """Return the remedy --model-free for an error text; "" if config.json has a `quantization_config`."""
    return "" if "quantization_config" in config else ", or quantize it with --model-free"


def why_no_class(config: Mapping[str, Any], directory: Path) -> str | None:
    """Return why transformers has no class of `architectures`; None if it has one."""
    from transformers import __version__

    names = named_classes(config)
    try:
        if model_class(config, directory)[0].__name__ in names:
            return None
    except CheckpointError:
        pass
    kind = f"{' or '.join(names) or 'class'} for model_type {config.get('model_type')!r}"
    return f"transformers {__version__} has no {kind}"


def named_classes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in `architectures` of a config.json; none for anything but a list of names."""
    named = config.get("architectures")
    return tuple(name for name in named if isinstance(name, str)) if isinstance(named, list) else ()


def _mappings_of(names: tuple[str, ...]) -> list[str]:
    """Return the names of transformers' Auto mappings that contain one of the classes `names`."""
    from transformers.models.auto import modeling_auto

    suffix = "_NAMES"
    tables = {key: value for key, value in vars(modeling_auto).items() if key.endswith(f"_MAPPING{suffix}")}
    return [
        key.removesuffix(suffix)
        for key, table in tables.items()
        if hasattr(modeling_auto, key.removesuffix(suffix)) and any(name in table.values() for name in names)
    ]


def of_mapping(mapping: str, parsed: Any) -> tuple[Any, Any] | None:
    """Return the class of transformers' Auto mapping for the config `parsed`, and the config to build it.

    `mapping` is the name of the mapping. That config may be the text config inside `parsed`. None if the
    mapping has no class for the type of `parsed`.
    """
    from transformers.models.auto import modeling_auto

    try:
        found = getattr(modeling_auto, mapping)[type(parsed)]
    except KeyError:
        return None
    # For some architectures a mapping lists several.
    cls = found[0] if isinstance(found, tuple) else found
    return cls, _config_for(cls, parsed) or parsed


def meta_model(config: Mapping[str, Any], directory: Path, *, buffers: bool = False) -> "nn.Module":
    """Build the model of a config without weights; raise `CheckpointError` if transformers cannot.

    With `buffers`, buffers are real, on the CPU: values that a model computes once, such as rope frequencies.
    """
    cls, parsed = model_class(config, directory)
    return build(cls, parsed, directory, buffers=buffers)


def parameter_count(config: Mapping[str, Any], directory: Path) -> int | None:
    """Return the parameters of the class of a config, tied ones once; None if it has no class to build."""
    try:
        model = meta_model(config, directory)
    except CheckpointError:
        return None
    return sum(parameter.numel() for parameter in model.parameters()) or None


def build(cls: Any, parsed: Any, directory: Path, *, buffers: bool = False) -> "nn.Module":
    """Build a model of class `cls` from the config `parsed`, without weights.

    With `buffers`, buffers are real, on the CPU. Raises `CheckpointError` naming the config.json in
    `directory` if transformers cannot.
    """
    import torch
    from accelerate import init_empty_weights

    try:
        with init_empty_weights(include_buffers=False) if buffers else torch.device("meta"):
            return cls._from_config(parsed)  # type: ignore[no-any-return]
    except Exception as error:
        raise CheckpointError(
            f"{directory / 'config.json'}: transformers cannot build a {cls.__name__} from it "
            f"({_short(error)}). Check its sizes, or restore the config.json of the original model."
        ) from error


def _named(name: str) -> Any:
    """Return the model class `name` of transformers; None if there is none."""
    import transformers

    found = getattr(transformers, name, None) if name.isidentifier() else None
    own = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if own and getattr(found, "config_class", None) is not None else None


def _config_for(cls: Any, parsed: Any) -> Any:
    """Return `parsed` or its text config, depending on which `cls` takes; None if neither."""
    if isinstance(parsed, cls.config_class):
        return parsed
    text = getattr(parsed, "text_config", None)
    return text if isinstance(text, cls.config_class) else None


def _with_floats(value: Any) -> Any:
    """Return `value` of a config.json with tags such as `{"__float__": "Infinity"}` replaced by floats."""
    if isinstance(value, list):
        return [_with_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    name = value.get(_FLOAT_TAG)
    if len(value) == 1 and isinstance(name, str) and name in _TAGGED_FLOATS:
        return _TAGGED_FLOATS[name]
    return {key: _with_floats(one) for key, one in value.items()}


def _short(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

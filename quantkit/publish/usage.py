"""Generate Python code that loads and runs a packed model, by transformers' auto class for its class."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import escaping
from quantkit.checkpoint.safetensors_header import read_json
from quantkit.checkpoint.source import CONFIG_NAME, examining
from quantkit.errors import QuantkitError
from quantkit.model.hf_files import has_processor

_TOKENS = 'inputs = tokenizer("Once upon a time", return_tensors="pt")\n'
_TEXT = f"{_TOKENS}print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))"


@dataclass(frozen=True)
class Usage:
    """Program that runs a kind of model.

    mapping     table of transformers with its class; gives the `Auto` class and `pipeline_tag` of the hub
    processor   makes the inputs: AutoTokenizer or AutoProcessor
    run         lines after loading, using `model` and `tokenizer` or `processor`
    without     arguments that models of this kind do not take, because they take more than text
    """

    mapping: str
    auto: str
    pipeline_tag: str | None
    run: str
    processor: str = "AutoTokenizer"
    without: tuple[str, ...] = ()


#: The first row whose table has the class is used.
USAGES = (
    Usage(
        "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
        "AutoModelForImageTextToText",
        "image-text-to-text",
        'content = [{"type": "image", "path": "photo.jpg"}, {"type": "text", "text": "What is this?"}]\n'
        "inputs = processor.apply_chat_template(\n"
        '    [{"role": "user", "content": content}],\n'
        '    add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt",\n'
        ").to(model.dtype)\n"
        "print(processor.decode(model.generate(**inputs, max_new_tokens=32)[0]))",
        "AutoProcessor",
    ),
    Usage(
        "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
        "AutoModelForSpeechSeq2Seq",
        "automatic-speech-recognition",
        "import soundfile  # pip install soundfile\n\n"
        'sound, rate = soundfile.read("speech.wav")\n'
        'inputs = processor(sound, sampling_rate=rate, return_tensors="pt").to(model.dtype)\n'
        "print(processor.batch_decode(model.generate(**inputs)))",
        "AutoProcessor",
    ),
    Usage("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM", None, _TEXT),
    Usage("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM", "text-generation", _TEXT),
    Usage(
        "MODEL_FOR_MASKED_LM_MAPPING",
        "AutoModelForMaskedLM",
        "fill-mask",
        'inputs = tokenizer(f"Once upon a {tokenizer.mask_token}.", return_tensors="pt")\n'
        'masked = inputs["input_ids"][0] == tokenizer.mask_token_id\n'
        "print(tokenizer.decode(model(**inputs).logits[0, masked].argmax(-1)))",
    ),
    Usage(
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        "AutoModelForSequenceClassification",
        "text-classification",
        f"{_TOKENS}print(model.config.id2label, model(**inputs).logits)",
    ),
    Usage(
        "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
        "AutoModelForTokenClassification",
        "token-classification",
        f"{_TOKENS}found = model(**inputs).logits[0].argmax(-1)\n"
        "print([model.config.id2label[label] for label in found.tolist()])",
    ),
    Usage(
        "MODEL_FOR_QUESTION_ANSWERING_MAPPING",
        "AutoModelForQuestionAnswering",
        "question-answering",
        'inputs = tokenizer("Who wrote it?", "Ada wrote it.", return_tensors="pt")\n'
        "found = model(**inputs)\n"
        "first, last = found.start_logits.argmax(), found.end_logits.argmax()\n"
        'print(tokenizer.decode(inputs["input_ids"][0, first : last + 1]))',
    ),
    Usage(
        "MODEL_FOR_MULTIPLE_CHOICE_MAPPING",
        "AutoModelForMultipleChoice",
        "multiple-choice",
        'inputs = tokenizer(["Once upon a"] * 2, ["time", "tree"], return_tensors="pt", padding=True)\n'
        "print(model(**{name: one[None] for name, one in inputs.items()}).logits)",
    ),
    Usage(
        "MODEL_MAPPING",
        "AutoModel",
        "feature-extraction",
        f"{_TOKENS}# A vector for each token; the original model's card says how to make one of them.\n"
        "print(model(**inputs).last_hidden_state.shape)",
        without=("pixel_values", "input_features", "input_values", "decoder_input_ids"),
    ),
)
#: Usage of models of images or sounds whose directory has no processor.
_WITHOUT_PROCESSOR: Mapping[str, str] = {"MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING": _TEXT}


def usage_of(directory: Path) -> Usage | None:
    """Return how to run the model in `directory`; None for a class without a row.

    Raises `CheckpointError` for an unreadable config.json.
    """
    from quantkit.model.model_class import model_class, of_mapping

    with examining(directory):
        if not (directory / CONFIG_NAME).is_file():
            return None
    config = read_json(directory / CONFIG_NAME)
    try:
        cls, parsed = model_class(config, directory)
    except QuantkitError:
        return None
    takes = inspect.signature(cls.forward).parameters
    for usage in USAGES:
        found = of_mapping(usage.mapping, parsed)
        if found is None or found[0] is not cls or not takes.keys().isdisjoint(usage.without):
            continue
        if usage.processor == "AutoTokenizer" or has_processor(directory):
            return usage
        run = _WITHOUT_PROCESSOR.get(usage.mapping)
        return None if run is None else Usage(usage.mapping, usage.auto, usage.pipeline_tag, run)
    return None


def snippet(usage: Usage | None, name: str) -> str:
    """Return a program that runs the model `name`, a directory or a hub id."""
    quoted = escaping.python(name)
    if usage is None:
        # For a class without a row, `load` finds the class.
        return f"import quantkit\n\nmodel = quantkit.load({quoted})"
    maker = usage.processor.removeprefix("Auto").lower()
    return (
        f"import quantkit\nfrom transformers import {usage.auto}, {usage.processor}\n\n"
        f"model = {usage.auto}.from_pretrained({quoted})\n"
        f"{maker} = {usage.processor}.from_pretrained({quoted})\n{usage.run}"
    )


def tag_of(usage: Usage | None) -> dict[str, Any]:
    """Return the pipeline entry of a card's front matter; empty if unknown."""
    return {} if usage is None or usage.pipeline_tag is None else {"pipeline_tag": usage.pipeline_tag}

"""Programs of model cards: each runs on a tiny model of its kind."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers

import quantkit
from quantkit.publish.card import make_card
from quantkit.publish.measurements import Measurements
from quantkit.publish.usage import USAGES, snippet, usage_of

from ..quantization.tiny import VOCAB, tiny_model

TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def tokenizer(**options: Any) -> Any:
    """A tokenizer of a word per token."""
    known = (
        "<pad>",
        "<bos>",
        "<eos>",
        "<mask>",
        "<image>",
        *["Once", "upon", "a", "time", "tree", "Who", "wrote", "it", "?", "What"],
    )
    words = {name: i for i, name in enumerate((*known, *(f"w{i}" for i in range(VOCAB - len(known)))))}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special, **options)


def llava() -> Any:
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    return transformers.LlavaProcessor(
        images,
        tokenizer(extra_special_tokens={"image_token": "<image>"}),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )


def whisper() -> Any:
    vocabulary = {chr(33 + i): i for i in range(90)} | {"<|endoftext|>": 90}
    words = transformers.WhisperTokenizer(vocab=vocabulary, merges=[])
    sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1, n_fft=400)
    return transformers.WhisperProcessor(sounds, words)


KINDS: dict[str, tuple[str, Callable[[], Any]]] = {
    "AutoModelForImageTextToText": ("LlavaForConditionalGeneration", llava),
    "AutoModelForSpeechSeq2Seq": ("WhisperForConditionalGeneration", whisper),
    "AutoModelForSeq2SeqLM": ("T5ForConditionalGeneration", tokenizer),
    "AutoModelForCausalLM": ("LlamaForCausalLM", tokenizer),
    "AutoModelForMaskedLM": ("BertForMaskedLM", tokenizer),
    "AutoModelForSequenceClassification": ("ModernBertForSequenceClassification", tokenizer),
    "AutoModelForTokenClassification": ("BertForTokenClassification", tokenizer),
    "AutoModelForQuestionAnswering": ("BertForQuestionAnswering", tokenizer),
    "AutoModelForMultipleChoice": ("BertForMultipleChoice", tokenizer),
    "AutoModel": ("Qwen3Model", tokenizer),
}


def packed(directory: Path, name: str, processor: Any) -> Path:
    torch.manual_seed(0)
    model = tiny_model(name).to(torch.bfloat16)
    if hasattr(model.config, "image_token_id"):
        model.config.image_token_id = processor.image_token_id
    if model.can_generate():
        model.generation_config.decoder_start_token_id = 0
    model.save_pretrained(directory / "source")
    processor.save_pretrained(directory / "source")
    quantkit.quantize(directory / "source", directory / "out", format="int8", device="cpu")
    return directory / "out"


@pytest.mark.parametrize("usage", USAGES, ids=lambda usage: usage.auto)
def test_the_program_of_each_kind_runs(
    usage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, processor = KINDS[usage.auto]
    out = packed(tmp_path, name, processor())
    assert usage_of(out) == usage
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.jpg")
    # soundfile is no dependency of the tests.
    sound = np.zeros(8000, dtype=np.float32)
    monkeypatch.setitem(sys.modules, "soundfile", SimpleNamespace(read=lambda path: (sound, 16000)))  # type: ignore[arg-type]
    monkeypatch.chdir(tmp_path)
    exec(snippet(usage, str(out)), {})
    assert capsys.readouterr().out.strip()
    front = make_card(out, Measurements()).front_matter
    assert front.get("pipeline_tag") == usage.pipeline_tag


def test_without_a_processor_a_model_of_images_is_given_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = packed(tmp_path, "LlavaForConditionalGeneration", llava())
    for name in ("processor_config.json", "preprocessor_config.json"):
        (out / name).unlink(missing_ok=True)
    usage = usage_of(out)
    assert usage is not None and (usage.auto, usage.processor) == (
        "AutoModelForImageTextToText",
        "AutoTokenizer",
    )
    exec(snippet(usage, str(out)), {})
    assert capsys.readouterr().out.strip()


def test_a_class_without_a_row_is_loaded_by_quantkit(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tiny_model("CLIPModel").save_pretrained(tmp_path)
    assert (
        usage_of(tmp_path) is None
        and snippet(None, "a/b") == 'import quantkit\n\nmodel = quantkit.load("a/b")'
    )
    (tmp_path / "config.json").write_text('{"model_type": "new"}')
    assert usage_of(tmp_path) is None

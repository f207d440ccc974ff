"""Fixtures of tiny models, which the `conftest.py` of a folder imports by name."""

import json
import logging
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit.calibrate import scaling
from quantkit.kernels.moe import router

from .packed import SCHEMES, VOCAB, Tiny, write_tiny

#: Rows of weights that are small in Triton's interpreter, which runs a program for each of them.
SMALL_ROWS = 16


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of linears of tiny models only routers are small without a GPU."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(router, "SMALL_ROWS", SMALL_ROWS)


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Tiny]:
    """`tiny(family, scheme, ...)` writes a checkpoint; see `write_tiny`."""

    def write(family: str = "llama", scheme: str = "int4", **options: Any) -> Tiny:
        directory = tmp_path / f"{family}-{scheme}-{len(list(tmp_path.iterdir()))}"
        return write_tiny(directory, family, SCHEMES[scheme], **options)

    return write


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Random characters to calibrate on."""
    path = tmp_path / "text.jsonl"
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(20):
        codes = torch.randint(0, 62, (60,), generator=generator).tolist()
        lines.append(json.dumps({"text": "".join(string.printable[code] for code in codes)}))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def few_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWQ tries three exponents: where it is not about which scales it finds, eleven only take longer."""
    monkeypatch.setattr(scaling, "EXPONENTS", (0.0, 0.5, 1.0))


@pytest.fixture
def prompt() -> torch.Tensor:
    """Token ids [2, 7]."""
    return torch.randint(3, VOCAB, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def transformers_warnings() -> Iterator[list[str]]:
    """Messages that transformers logs at level warning or above during the test."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, handler = logging.getLogger("transformers"), Handler(logging.WARNING)
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


@pytest.fixture
def words():
    """A tokenizer of a word per token: "w17" is 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )

"""Logits of a fixed prompt: what is stored, what may differ, and what may not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quantkit
from quantkit.checkpoint.manifest import (
    MANIFEST_NAME,
    OWN_HASH,
    manifest_bytes,
    read_manifest,
    verify_files,
    verify_manifest,
)
from quantkit.errors import CheckpointError
from quantkit.verification.prompt_logits import (
    KEY,
    PROMPT_TOKENS,
    TOLERANCE,
    TOP,
    PromptLogits,
    _refused_by_class,
    bytes_to_run,
    compare,
    differences,
    record,
)

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logits") / "int4"
    quantkit.quantize(SOURCE, directory, format="int4")
    return directory


@pytest.fixture(scope="module")
def stored(packed: Path) -> PromptLogits:
    before = read_manifest(packed)
    found = record(packed)
    after = read_manifest(packed)
    same = after.keys() - {KEY, OWN_HASH}
    assert {key: after[key] for key in same} == {key: before[key] for key in before.keys() - {OWN_HASH}}
    assert not verify_files(packed, after) and not verify_manifest(packed)
    return found


def test_what_is_stored_is_what_the_model_answers(packed: Path, stored: PromptLogits) -> None:
    assert PromptLogits.from_manifest(read_manifest(packed)) == stored
    assert len(stored.prompt) == len(set(stored.prompt)) == PROMPT_TOKENS
    assert {len(row) for row in stored.tokens} == {TOP}
    model = quantkit.load(packed, device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([stored.prompt])).logits[0]
    for row, tokens, values in zip(logits, stored.tokens, stored.logits, strict=True):
        assert row[list(tokens)].tolist() == pytest.approx(list(values), rel=1e-5)
        assert max(row) == row[tokens[0]]
    assert record(packed) == stored, "what is stored stays"


def test_other_kernels_agree(packed: Path, stored: PromptLogits, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(packed) == []
    monkeypatch.setenv("QUANTKIT_KERNEL", "unpack")
    assert compare(packed) == []


def _answer(stored: PromptLogits, vocabulary: int = 512) -> torch.Tensor:
    """Logits that are exactly those stored; every other token's are far below."""
    logits = torch.full((len(stored.prompt), vocabulary), -100.0)
    return logits.scatter(1, torch.tensor(stored.tokens), torch.tensor(stored.logits))


def test_logits_may_differ_by_the_tolerance_and_no_more(stored: PromptLogits) -> None:
    logits = _answer(stored)
    assert differences(stored, logits) == []
    largest = float(logits.max())
    token = stored.tokens[3][2]
    for part, fine in ((0.9, True), (1.1, False)):
        moved = logits.clone()
        moved[3, token] += part * TOLERANCE * largest
        assert (differences(stored, moved) == []) is fine
    (text,) = differences(stored, moved)
    assert text.startswith(f"position 3, token {token}: logit ")
    assert text.endswith(f"is the stored one at {PROMPT_TOKENS} of {PROMPT_TOKENS} positions")
    # A token that was not among the largest.
    other = next(token for token in range(512) if token not in stored.tokens[5])
    moved = logits.clone()
    moved[5, other] = 2 * largest
    assert "at 15 of 16 positions" in differences(stored, moved)[0]
    assert "has a stored logit, and the model 4 tokens" in differences(stored, logits[:, :4])[0]


def test_a_wrong_scale_is_found(packed: Path, stored: PromptLogits) -> None:
    model = quantkit.load(packed, device="cpu", dtype=torch.float32)
    with torch.inference_mode():
        model.model.norm.weight *= 1.01
        logits = model(torch.tensor([stored.prompt])).logits[0]
    assert differences(stored, logits)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("tokens"),
        lambda data: data["prompt"].append(1),
        lambda data: data["prompt"].__setitem__(0, -1),
        lambda data: data["tokens"][0].pop(),
        lambda data: data["logits"][0].__setitem__(0, "1"),
        lambda data: data["logits"][0].__setitem__(0, 1e999),
        lambda data: data.update(tokens=3),
    ],
)
def test_hostile_records_are_refused(
    packed: Path, stored: PromptLogits, change: Callable[[Any], object]
) -> None:
    data = json.loads((packed / MANIFEST_NAME).read_text())[KEY]
    change(data)
    with pytest.raises(CheckpointError, match="is not a prompt with tokens and finite logits"):
        PromptLogits.from_manifest({KEY: data})


def test_a_stored_prompt_of_another_model(packed: Path, stored: PromptLogits, tmp_path: Path) -> None:
    manifest = {**read_manifest(packed), KEY: vars(replace(stored, prompt=(512,) * PROMPT_TOKENS))}
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / MANIFEST_NAME).write_bytes(manifest_bytes(manifest))
    with pytest.raises(CheckpointError, match="prompt has token 512, the embedding 512 rows"):
        compare(tmp_path)


def test_the_memory_it_takes(packed: Path) -> None:
    tensors = sum(file.stat().st_size for file in packed.glob("*.safetensors"))
    assert tensors < bytes_to_run(packed) < 4 * tensors


@pytest.mark.parametrize(
    ("source", "module", "refused"),
    [
        ("SimpleNamespace().image_outputs", "transformers.models.made_up", True),
        ("nn.Linear(1, 1).qweight", "transformers.models.made_up", False),
        ("torch.zeros(1).qweight", "transformers.models.made_up", False),
        ("SimpleNamespace().image_outputs", "quantkit.made_up", False),
        ("int('x')", "transformers.models.made_up", True),
        ("torch.zeros(2) @ torch.zeros(3)", "transformers.models.made_up", False),
    ],
)
def test_errors_of_a_class_are_told_from_those_of_weights(source, module, refused):
    names = {"__name__": module, "SimpleNamespace": SimpleNamespace, "nn": torch.nn, "torch": torch}
    with pytest.raises((AttributeError, ValueError, RuntimeError)) as caught:
        exec(compile(source, "made_up.py", "exec"), names)
    assert _refused_by_class(caught.value) is refused

"""The losses of single blocks, against models in memory whose blocks are exchanged one at a time."""

from pathlib import Path

import pytest
import torch

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.eval import evaluate as evaluate_module
from quantkit.eval import per_block
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.evaluate import evaluate, evaluate_many
from quantkit.eval.per_block import BlockLosses, block_losses
from quantkit.eval.result_cache import Partial
from quantkit.quantizing import quantize
from quantkit.report.eval_report import write_report
from quantkit.runtime.load import load

ROOT = Path(__file__).parents[2]
STORIES = ROOT / "examples" / "stories260K"
TEXT = ROOT / "examples" / "stories.txt"
OPTIONS = {"against": STORIES, "texts": [TEXT], "window": 64, "max_windows": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "int3"
    quantize(STORIES, out, format="int3")
    return out


@torch.inference_mode()
def exchanged(packed: Path, tokens: torch.Tensor, scored: int) -> dict[str, float]:
    original, ours = load(STORIES, device="cpu"), load(packed, device="cpu")
    layers, theirs = original.model.layers, ours.model.layers
    expected = original(input_ids=tokens).logits[:, -scored - 1 : -1].double().log_softmax(-1)
    found = {}
    for at in range(len(layers)):
        kept, layers[at] = layers[at], theirs[at]
        logits = original(input_ids=tokens, use_cache=False).logits[:, -scored - 1 : -1].double()
        layers[at] = kept
        divergence = (expected.exp() * (expected - logits.log_softmax(-1))).sum(-1)
        found[f"model.layers.{at}"] = divergence.mean().item()
    return found


@pytest.mark.parametrize("scored", [63, 20])
def test_losses_are_those_of_exchanged_blocks(packed: Path, scored: int) -> None:
    tokens = torch.randint(0, 512, (3, 64), generator=torch.Generator().manual_seed(1))
    steps = []
    found = block_losses(
        *map(Checkpoint.open, (packed, STORIES)),
        tokens,
        scored,
        torch.float32,
        "cpu",
        lambda done, total, label: steps.append((done, total, label)),
    )
    assert found.tokens == 3 * scored
    expected = exchanged(packed, tokens, scored)
    assert found.kl_mean.keys() == expected.keys() and len(expected) == 5
    assert found.kl_mean == pytest.approx(expected, rel=1e-4, abs=1e-7)
    assert min(expected.values()) > 1e-4
    assert steps[-1] == (25, 25, "predictions") and [done for done, *_ in steps] == list(range(1, 26))


def test_a_block_that_is_the_originals_costs_nothing() -> None:
    original = Checkpoint.open(STORIES)
    tokens = torch.arange(64)[None]
    found = block_losses(original, original, tokens, 63, torch.float32, "cpu")
    assert set(found.kl_mean.values()) == {0.0}


def test_evaluation_has_them_on_the_first_windows_and_keeps_them(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, steps = Partial(tmp_path / "work"), list[tuple[int, int]]()
    (found,) = evaluate_many(
        [packed],
        EvalOptions(per_block=True, **OPTIONS),
        partial=partial,
        progress=lambda done, total, label: steps.append((done, total)),
    )
    # The time left is that of all: 3 windows of both models, and 25 runs of blocks on 2 windows, where a pass
    # with its predictions is 6.
    assert {total for _, total in steps} == {2 * 3 + 2 * 25 // 6}
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1] == (14, 14)
    assert found.per_block is not None and found.per_block.tokens == per_block.WINDOWS * 63
    assert found.to_dict()["per_block"]["kl_mean"].keys() == {f"model.layers.{i}" for i in range(5)}
    monkeypatch.setattr(evaluate_module, "block_losses", lambda *_: pytest.fail("they were measured again"))
    (again,) = evaluate_many([packed], EvalOptions(per_block=True, **OPTIONS), partial=partial)
    assert again.per_block == found.per_block
    assert evaluate(packed, **OPTIONS).per_block is None

    files = {path.name for path in write_report(tmp_path / "report", [found])}
    assert "kl-blocks.png" in files
    page = (tmp_path / "report" / "report.md").read_text()
    assert "Where the loss is: KL over 126 tokens of the original with one block of the model" in page


def test_blocks_of_a_rotated_model_are_not_exchanged(tmp_path: Path) -> None:
    quantize(STORIES, tmp_path / "rotated", format="int4", rotate=True)
    found = evaluate(tmp_path / "rotated", per_block=True, **OPTIONS)
    assert found.per_block is None
    (note,) = [note for note in found.notes if "blocks" in note]
    assert note == (
        f"the KL of its blocks was not measured: {tmp_path / 'rotated'}: model.embed_tokens.weight is not "
        "the original's, so its blocks see other hidden states, as after --rotate and with --embeddings"
    )


def test_losses_need_an_original(packed: Path) -> None:
    with pytest.raises(UsageError, match="Give the original to compare with"):
        evaluate(packed, texts=[TEXT], per_block=True, device="cpu")


def test_losses_are_json() -> None:
    assert BlockLosses({"a": 0.5}, 3).to_dict() == {"kl_mean": {"a": 0.5}, "tokens": 3}


def test_blocks_of_a_dense_model_are_left_out_with_a_note() -> None:
    found = evaluate(STORIES, per_block=True, **OPTIONS)
    assert found.per_block is None
    assert "the KL of its blocks was not measured: stories260K is not quantized" in found.notes


def test_blocks_that_give_no_numbers_are_an_error(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = per_block.load

    def damaged(*arguments: object, **options: object) -> object:
        model = original(*arguments, **options)
        model.model.layers[2].input_layernorm.weight.data.fill_(float("nan"))
        return model

    monkeypatch.setattr(per_block, "load", damaged)
    tokens = torch.arange(64)[None]
    with pytest.raises(CheckpointError, match="int3: the model gives logits that are not finite"):
        block_losses(*map(Checkpoint.open, (packed, STORIES)), tokens, 63, torch.float32, "cpu")

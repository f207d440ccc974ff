"""A GPU that has too little memory, for real: row 69. What torch may allocate is bounded, from little on."""

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from quantkit import memory
from quantkit.errors import EnvironmentProblem

from ..conftest import Run
from .faults import SOURCE, STORIES, WEIGHTS, Message, check_message, is_unfinished, snapshot

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU has the memory")
GPTQ = ("-m", "gptq", "--calibration", STORIES, "--calibration-samples", 8, "--calibration-length", 128)
MIB = 1 << 20
Room = Callable[[int], None]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one block with linears of 4 million weights, and the tokenizer of stories260K."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("wide")
    shutil.copytree(SOURCE, directory, dirs_exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=1,
        num_attention_heads=8,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return directory


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Iterator[Room]:
    """`room(mebibytes)`: let torch allocate so much more than it has."""
    total = torch.cuda.mem_get_info()[1]

    def bound(mebibytes: int) -> None:
        # What an earlier run left for the garbage collector would be room.
        gc.collect()
        torch.cuda.empty_cache()
        monkeypatch.setattr(memory, "_said", set())
        share = (torch.cuda.memory_reserved() + mebibytes * MIB) / total
        torch.cuda.set_per_process_memory_fraction(share)

    yield bound
    torch.cuda.set_per_process_memory_fraction(1.0)


@on_a_gpu
@pytest.mark.fault(69)
@pytest.mark.parametrize("method", [("-m", "mse"), GPTQ], ids=["plain", "calibrated"])
def test_quantizing_takes_smaller_pieces_or_says_what_it_needs(
    run: Run,
    tmp_path: Path,
    wide: Path,
    room: Room,
    caplog: pytest.LogCaptureFixture,
    method: tuple[object, ...],
) -> None:
    def command(out: Path) -> tuple[object, ...]:
        return ("quantize", wide, out, *method, "--no-check", "--device", "cuda")

    assert run(*command(tmp_path / "whole")).code == 0
    whole = snapshot(tmp_path / "whole")
    outcomes = set()
    for mebibytes in (4, 16, 48, 96, 160, 280, 400, 2000):
        out = tmp_path / str(mebibytes)
        caplog.clear()
        room(mebibytes)
        done = run(*command(out))
        said = [record.getMessage() for record in caplog.records if record.name == "quantkit.memory"]
        if done.code:
            message = Message("the GPU", "too little memory", "needed at once", "--resume")
            check_message(done, EnvironmentProblem, message)
            if out.exists():
                is_unfinished(out)
            outcomes.add("refused")
            room(4000)
            done = run(*command(out), "--resume")
        else:
            outcomes.add("in pieces" if said else "whole")
        assert done.code == 0, done.err
        if method[1] == "mse":
            # What is chosen for a row does not depend on those beside it.
            assert snapshot(out)[WEIGHTS] == whole[WEIGHTS], mebibytes
        assert run("verify", out, "--no-reload").code == 0
    assert {"refused", "whole"} <= outcomes
    # Calibration has other sums of the matrix in memory than what rows take.
    assert "in pieces" in outcomes or method[1] == "gptq"


@on_a_gpu
@pytest.mark.fault(69)
@pytest.mark.parametrize("command", [("generate", "hello"), ("eval", "--text", STORIES)], ids=str)
def test_running_says_what_it_needs(
    run: Run, tmp_path: Path, wide: Path, room: Room, command: tuple[object, ...]
) -> None:
    out = tmp_path / "out"
    assert run("quantize", wide, out, "-m", "rtn", "--no-check").code == 0
    codes = []
    for mebibytes in (2, 12, 24, 48, 2000):
        room(mebibytes)
        done = run(command[0], out, *command[1:], "--device", "cuda")
        codes.append(done.code)
        if done.code:
            message = Message(out, "the GPU has too little memory", "needed at once", "device")
            check_message(done, EnvironmentProblem, message)
    assert codes[0] and not codes[-1], codes

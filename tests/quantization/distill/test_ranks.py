"""Ranks that train together hold the same student, and write what one process writes."""

import math
import os
import signal
import sys
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.cli.main import main
from quantkit.errors import EnvironmentProblem, FormatError, OtherRankFailed, UsageError
from quantkit.model.distributed import Ranks, join_ranks
from quantkit.quantization.distill import distill, training
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.residence import Residence
from quantkit.quantization.distill.student import Norm, Student
from quantkit.quantization.distill.trained_weights import Place
from quantkit.quantization.distill.training import Training
from quantkit.quantization.distill.training_memory import Way
from quantkit.quantizing import quantize

from ...support.processes import assert_one_says_why, ended
from ...tiny.calibrated import data, files_of, interrupted_at, write

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"format": "int2", "group_size": 16, "method": "mse,distill", "device": "cpu"}


def given(text: Path | None, steps: int, **changes: Any) -> dict[str, Any]:
    """What `quantize` is given for so many steps."""
    options = {"batch": 4, "code_rate": 2e-2, **changes}
    return {**TINY, "calibration": data(text), "distillation": DistillOptions(steps, **options)}


def successes(found: list[tuple[int, str, str]]) -> None:
    assert [code for code, _, _ in found] == [0] * len(found), found


def assert_alike(found: Path, expected: Path) -> None:
    """Check that files are the same, and what manifests say of a training but for the number of processes."""
    (files, facts), (others, wanted) = (
        (files_of(one), read_manifest(one)["distillation"]) for one in (found, expected)
    )
    for one in (files, others):
        del one[MANIFEST_NAME]
    assert files == others
    # Sums over what is held out have another order.
    for name in ("kl_before", "kl_after"):
        assert facts.pop(name) == pytest.approx(wanted.pop(name), rel=1e-6)
    for one in (facts, wanted):
        del one["settings"]["processes"]
    assert facts == wanted


@pytest.mark.parametrize(
    ("family", "batch", "micro", "count"),
    [
        ("llama", 4, 2, 2),
        # One rank has two sequences, and the other has one.
        ("llama", 3, 2, 2),
        ("mixtral", 3, 1, 3),
    ],
)
def test_ranks_write_what_one_process_writes_with_their_shares_as_micro_batches(
    tmp_path: Path,
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    batch: int,
    micro: int,
    count: int,
) -> None:
    monkeypatch.setattr(distill, "choose", lambda *_: Way(micro))
    source = write(tmp_path, family, num_hidden_layers=2)
    options = given(text, 12, batch=batch)

    def run(_: int) -> None:
        quantize(source, tmp_path / os.environ["WORLD_SIZE"], **options)

    for processes in (1, count):
        successes(ended(run, tmp_path, processes))
    assert_alike(tmp_path / f"{count}", tmp_path / "1")
    facts = read_manifest(tmp_path / f"{count}")["distillation"]
    assert facts["settings"]["processes"] == [count] and facts["settings"]["batch"] == batch
    assert facts["kl_after"] < facts["kl_before"] and facts["sequences"]["own"] > 0


def test_ranks_train_on_what_the_others_wrote_if_one_writes_loops(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "choose", lambda *_: Way(2))
    source, options = write(tmp_path, num_hidden_layers=2), given(text, 2)

    def own_samples(_: Any, windows: torch.Tensor, length: int, *given: Any) -> Any:
        for number in given[2]:
            numbers = torch.Generator().manual_seed(number)
            yield torch.randint(3, 20, (11 + 11 * number, length), generator=numbers) * number

    monkeypatch.setattr(distill, "own_samples", own_samples)

    def run(_: int) -> None:
        quantize(source, tmp_path / os.environ["WORLD_SIZE"], **options)

    for processes in (1, 2):
        successes(ended(run, tmp_path, processes))
    assert_alike(tmp_path / "2", tmp_path / "1")
    sequences = read_manifest(tmp_path / "2")["distillation"]["sequences"]
    assert (sequences["own"], sequences["own_repeating"]) == (22, 11)


def test_an_interrupted_training_goes_on_with_as_many_ranks_or_one(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(distill, "STATE_PART", math.inf)
    monkeypatch.setattr(distill, "choose", lambda *_: Way(2))
    source, options, calls = write(tmp_path, num_hidden_layers=2), given(text, 6), list[str]()
    quantize(source, tmp_path / "one", progress=lambda *call: calls.append(call[2]), **options)
    stop = next(at for at, said in enumerate(calls) if said.startswith("step 4 of 6"))

    def start(rank: int) -> None:
        # The other rank writes a batch of samples at the same time, of which the first one hears.
        with pytest.raises(KeyboardInterrupt) if rank == 0 else pytest.raises(OtherRankFailed):
            quantize(source, tmp_path / "2", progress=interrupted_at(stop + 1), **options)
        assert (tmp_path / "2" / "distill-state-0.safetensors").exists()

    def resume(rank: int) -> None:
        quantize(source, tmp_path / "2", resume=True, **options)

    successes(ended(lambda _: quantize(source, tmp_path / "whole", **options), tmp_path))
    for processes in (2, 1):
        successes(ended(start, tmp_path))
        successes(ended(resume, tmp_path, processes))
        facts = read_manifest(tmp_path / "2")["distillation"]
        assert facts["settings"]["processes"] == list(dict.fromkeys([2, processes]))
        assert_alike(tmp_path / "2", tmp_path / "whole")
        (tmp_path / "2").rename(tmp_path / f"resumed-{processes}")


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    ("rank", "fault", "codes"), [(1, "error", [4, 4]), (0, "error", [4, 4]), (1, "kill", [7, -9])]
)
def test_a_rank_that_fails_in_a_step_stops_all(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, rank: int, fault: str, codes: list[int]
) -> None:
    source, move, calls = write(tmp_path, num_hidden_layers=1), Training._move, list[Any]()
    monkeypatch.setattr(training, "CHUNK_WEIGHTS", 4096)

    def planted(*arguments: Any) -> None:
        calls.append(arguments)
        # In the middle of a step, while the other goes on to the next part of the gradients.
        if os.environ["RANK"] == str(rank) and len(calls) == 15:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FormatError("planted")
        move(*arguments)

    monkeypatch.setattr(Training, "_move", planted)

    def command(_: int) -> None:
        asked = (f"--calibration={text}", "--calibration-samples=12", "--calibration-length=24")
        method = ("--format=int2", "--group-size=16", "--method=mse,distill", "--steps=9", "--device=cpu")
        sys.argv = ["quantkit", "quantize", str(source), str(tmp_path / "out"), *asked, *method]
        main()

    found = ended(command, tmp_path)
    assert_one_says_why(found, codes, rank, was_killed=fault == "kill")
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_first_rank_decides_how_long_and_the_poorest_in_which_way(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, free_share = write(tmp_path, num_hidden_layers=1), distill.free_share
    options = {**given(text, 1), "distillation": DistillOptions(seconds=4.0, batch=4)}

    def run(rank: int) -> None:
        if rank == 1:
            # No step ends in its time, and it has no memory.
            ticks = accumulate([1000.0] * 10_000_000)
            clock = SimpleNamespace(monotonic=lambda: next(ticks))
            monkeypatch.setattr(training, "time", clock)
            monkeypatch.setattr(distill, "time", clock)
        monkeypatch.setattr(distill, "free_share", lambda *of: 0 if rank == 1 else free_share(*of))
        quantize(source, tmp_path / "out", **options)

    successes(ended(run, tmp_path))
    facts = read_manifest(tmp_path / "out")["distillation"]
    assert facts["steps"] > training.MEASURED + 1 and facts["settings"]["micro_batch"] == 1


def test_ranks_whose_students_differ_stop(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path, num_hidden_layers=1)

    def run(rank: int) -> None:
        if rank == 1:
            # It computes in another way.
            monkeypatch.setattr(Norm, "clamp", lambda self: self.numbers["norm"].add_(0.5))
        with pytest.raises(EnvironmentProblem if rank == 0 else OtherRankFailed) as raised:
            quantize(source, tmp_path / "out", **given(text, 30))
        assert "after step 10 ranks 0 and 1 hold different weights" in str(raised.value)

    successes(ended(run, tmp_path))


@pytest.mark.parametrize(("kind", "gpus", "said"), [("cuda", 8, True), ("cuda", 1, False), ("cpu", 8, False)])
def test_gpus_without_a_process_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, gpus: int, said: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    distill._say_if_idle(torch.device(kind), Ranks())
    text = "the training uses 1 of the 8 GPUs here; to use all, run the same command by torchrun --nproc"
    assert [one.startswith(text) for one in caplog.messages] == [True] * said


def test_more_ranks_than_sequences_are_refused(tmp_path: Path, text: Path) -> None:
    ranks = Ranks()
    ranks.size = 5
    message = r"torchrun started 5 processes.*trains on 4 sequences.*Start at most 4\."
    with pytest.raises(UsageError, match=message):
        quantize(write(tmp_path), tmp_path / "out", ranks=ranks, **given(text, 2))
    assert not (tmp_path / "out").exists()


class Branching(nn.Module):
    """A model of two vectors, one of which only sequences with token 0 reach."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.common, self.rare = nn.LayerNorm(4, bias=False), nn.LayerNorm(4, bias=False)
        self.requires_grad_(False)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        x = self.common(self.embedding(input_ids))
        if (input_ids == 0).any():
            x = self.rare(x)
        return SimpleNamespace(logits=x @ self.embedding.weight.T)


@pytest.mark.parametrize("zeros", [[0, 3], [3], []])
def test_a_part_that_one_rank_or_none_reaches(tmp_path: Path, zeros: list[int]) -> None:
    """The last of the sequences of a step belong to rank 1."""
    torch.manual_seed(0)
    model, tokens = Branching(), torch.randint(1, 7, (4, 5))
    tokens[zeros, 2] = 0
    pool = SimpleNamespace(batch=lambda *_: tokens, held_out=tokens)

    def run(_: int) -> None:
        names = ("common.weight", "rare.weight")
        norms = {name: Norm(torch.full((4,), 1.5), torch.float32) for name in names}
        places = {name: (Place(name),) for name in names}
        student = Student(model, norms, places, {}, {}, {}, Residence(CPU), [])
        with join_ranks() as ranks:
            options, fixed_pool = DistillOptions(12, batch=4, norm_rate=1e-2), pool
            one = Training(student, fixed_pool, options, 2, ranks)  # type: ignore[arg-type]
            one.run(lambda: 0.0, lambda _: None)
            torch.save({**one.state(), "after": one.measure()}, tmp_path / f"{ranks.size}-{ranks.number}.pt")

    for processes in (1, 2):
        successes(ended(run, tmp_path, processes))
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    assert one.keys() == first.keys() == second.keys()
    assert ("rare.weight.norm.mean0" in one) == bool(zeros)
    for name, expected in one.items():
        assert torch.equal(*map(torch.as_tensor, (first[name], expected))), name
        assert torch.equal(*map(torch.as_tensor, (second[name], expected))), name


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtypes", [("float32",), ("bfloat16",), ("bfloat16", "float32")])
def test_ranks_add_up_in_their_order(tmp_path: Path, count: int, dtypes: tuple[str, ...]) -> None:
    """Each sum is that of float32, rounded once; a view of every second row is changed in place."""

    def of_rank(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        found = [torch.randn(5, 3, generator=generator).to(getattr(torch, dtype)) for dtype in dtypes]
        return [*found, torch.randn(1, generator=generator).to(found[0].dtype)]

    def run(rank: int) -> None:
        tensors = of_rank(rank)
        with join_ranks() as ranks:
            ranks.add_up([])
            ranks.add_up([tensors[0][::2], *tensors[1:]])
        torch.save(tensors, tmp_path / f"{rank}.pt")

    successes(ended(run, tmp_path, count))
    given = [of_rank(rank) for rank in range(count)]
    for rank in range(count):
        first, *others = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(first[1::2], given[rank][0][1::2])
        for at, found in enumerate((first[::2], *others)):
            total = torch.zeros(found.shape)
            for one in given:
                total += one[at][::2] if at == 0 else one[at]
            assert torch.equal(found, total.to(found.dtype))


def test_one_process_adds_up_nothing() -> None:
    tensor = torch.arange(3.0)
    Ranks().add_up([tensor])
    assert tensor.tolist() == [0, 1, 2]

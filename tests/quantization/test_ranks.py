"""Several ranks write what one process writes, or all of them stop."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate.hessian import RunSum
from quantkit.cli.main import main
from quantkit.errors import EnvironmentProblem, FormatError
from quantkit.model import distributed as sharing
from quantkit.model.distributed import Ranks, Record, join_ranks
from quantkit.quantization.blockwise import pipeline
from quantkit.quantizing import quantize

from ..support.processes import assert_one_says_why, ended
from ..tiny.calibrated import data, files_of, interrupted_at, write


def command(*arguments: str | Path) -> None:
    """The command line."""
    sys.argv = ["quantkit", "quantize", *map(str, arguments)]
    main()


#: Biases and scales that are folded; a head, rounding without data, code books; and experts.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptq": ("llama", {"method": "gptq", "lm_head": "int4:32"}),
    "awq": ("qwen2", {"method": "awq"}),
    "best": ("llama", {"method": "best", "rules": ("*.layers.1.mlp.*=int8::mse", "*.k_proj=book4::best")}),
    "static": ("llama", {"scheme": "FP8", "kv_scales": "fp8", "method": "gptq"}),
    "experts": ("mixtral", {"method": "best"}),
}


@pytest.mark.parametrize(("family", "options"), CASES.values(), ids=CASES)
@pytest.mark.sampled(3)
def test_ranks_write_the_bytes_of_one_process(tmp_path, text, few_scales, family, options):
    source = write(tmp_path, family, num_hidden_layers=2)
    options = {"group_size": 32, "calibration": data(text), **options}
    one = quantize(source, tmp_path / "one", **options)

    def run(rank: int) -> None:
        assert quantize(source, tmp_path / "two", **options).measured == one.measured

    # Of three micro-batches one rank has two, so that sums are not those of two halves.
    found = ended(run, tmp_path)
    assert [code for code, _, _ in found] == [0, 0], found
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["stored", "replayed"])
@pytest.mark.sampled(3)
def test_fewer_samples_than_ranks_and_a_resume_with_another_number(tmp_path, text, monkeypatch, seconds):
    monkeypatch.setattr(pipeline, "HIDDEN_SECONDS", seconds)
    source = write(tmp_path, "mixtral", num_hidden_layers=2)
    options = {"method": "best", "group_size": 32, "calibration": data(text, samples=8), "lm_head": "int4:32"}
    quantize(source, tmp_path / "one", **options)

    def start(rank: int) -> None:
        with pytest.raises(KeyboardInterrupt) if rank == 0 else pytest.raises(sharing.OtherRankFailed):
            quantize(source, tmp_path / "out", progress=interrupted_at(22), **options)

    def resume(rank: int) -> None:
        quantize(source, tmp_path / "out", resume=True, **options)

    for function, count in ((start, 2), (resume, 3)):
        found = ended(function, tmp_path, count)
        assert [code for code, _, _ in found] == [0] * count, found
    assert files_of(tmp_path / "out") == files_of(tmp_path / "one")


@pytest.mark.fault(71)
@pytest.mark.parametrize(
    ("rank", "fault", "codes"),
    [(0, "error", [4, 4]), (1, "bug", [1, 1]), (1, "kill", [7, -9])],
)
def test_a_rank_that_fails_stops_all_and_one_says_why(tmp_path, text, monkeypatch, rank, fault, codes):
    source, add, calls = write(tmp_path), RunSum.add, []

    def planted(*arguments: Any) -> None:
        calls.append(arguments)
        # While it hears what the others have summed.
        if os.environ["RANK"] == str(rank) and len(calls) == 9:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise FormatError("planted") if fault == "error" else ZeroDivisionError("planted")
        add(*arguments)

    monkeypatch.setattr(RunSum, "add", planted)
    options = ("--method=gptq", "--calibration-samples=12", "--calibration-length=24")
    found = ended(lambda _: command(source, tmp_path / "out", f"--calibration={text}", *options), tmp_path)
    assert_one_says_why(found, codes, rank, was_killed=fault == "kill")
    if fault != "kill":
        assert [error.count("Traceback") for _, _, error in found] == [0, int(fault == "bug")]
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--method=mse",), 2, "torchrun started 2 processes, which share a calibration, but no method"),
        (("--method=gptq", "--seed=RANK"), 2, "ranks 0 and 1 .* differ in calibration"),
    ],
)
def test_what_is_refused_is_said_once(tmp_path, text, options, code, message):
    source = write(tmp_path)
    data_options = () if "--method=mse" in options else (f"--calibration={text}", "--calibration-length=24")

    def run(rank: int) -> None:
        given = (option.replace("RANK", str(rank)) for option in options)
        command(source, tmp_path / "out", *data_options, *given)

    first, second = ended(run, tmp_path)
    assert (first[0], second[0]) == (code, code)
    assert re.search(message, first[2]) and second[1] == second[2] == ""
    assert not (tmp_path / "out").exists()


def test_one_process_alone_meets_nobody(monkeypatch):
    for name in sharing.ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    with join_ranks() as alone:
        assert (alone.number, alone.size, alone.first) == (0, 1, True)
        record = Record({"a": torch.arange(3)}, {"b": 1})
        assert [one.facts for one in alone.gather_records([record], torch.device("cpu"))] == [{"b": 1}]
    assert not torch.distributed.is_initialized()


def test_ranks_that_cannot_meet_are_told_where(monkeypatch):
    found = dict(zip(sharing.ENVIRONMENT, ("0", "2", "0", "2", "nowhere.invalid", "x"), strict=True))
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(EnvironmentProblem, match=r"rank 0 cannot join the 2 .* nowhere\.invalid:x"),
        join_ranks(),
    ):
        pass


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 32])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_shares_are_in_order_and_even(count, size):
    ranks = [Ranks() for _ in range(size)]
    for number, one in enumerate(ranks):
        one.number, one.size = number, size
    shares = [one.share(count) for one in ranks]
    assert [item for share in shares for item in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert len(shares[0]) > 0 or count == 0

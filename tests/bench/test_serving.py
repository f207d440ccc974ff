"""Latency under load: the trace, the arithmetic, and a replay on the CPU."""

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

import quantkit
from quantkit.bench import machine as machine_module
from quantkit.bench import serving
from quantkit.bench.bench_options import ServeOptions
from quantkit.bench.serving import Answer, make_trace, measure_serving, summarize
from quantkit.errors import EnvironmentProblem, UsageError


def test_trace_is_a_poisson_process() -> None:
    trace = make_trace(4000, (4, 64), (2, 32), 100, seed=3)
    assert trace == make_trace(4000, (4, 64), (2, 32), 100, seed=3)
    assert trace[:5] != make_trace(5, (4, 64), (2, 32), 100, seed=4)
    gaps = [b.arrival - a.arrival for a, b in pairwise(trace)]
    # Mean and standard deviation of an exponential distribution are equal; 4000 draws are 1.6 % off.
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1, rel=0.08)
    assert deviation == pytest.approx(1, rel=0.08)
    lengths = [len(request.prompt) for request in trace]
    assert (min(lengths), max(lengths)) == (4, 64)
    # Log-uniform: half are below the geometric mean.
    assert sum(length <= 16 for length in lengths) / len(lengths) == pytest.approx(0.5, abs=0.04)
    assert {request.new_tokens for request in trace} == set(range(2, 33))
    assert max(max(request.prompt) for request in trace) == 99


def test_latencies_are_counted_from_the_arrival() -> None:
    answers = [Answer(10.0, (11.0, 12.0, 15.0)), Answer(12.0, (12.5,)), Answer(13.0, (20.0, 21.0))]
    load = summarize(2.0, answers)
    assert load.rate == 2
    assert (load.first_token.p50, load.first_token.p99) == (1.0, 7.0)
    assert (load.token.p50, load.token.p99) == (1.0, 2.0)
    assert (load.end_to_end.p50, load.end_to_end.p90) == (5.0, 8.0)
    assert (load.served, load.decode) == (3 / 11, 6 / 11)
    assert summarize(1.0, answers[1:2]).token.p50 == 0


def test_replay_answers_as_generate_does(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_READ_BYTES", 1 << 20)
    results: list[Any] = []
    replay = serving._replay

    def recorded(manager: Any, trace: Any, rate: float) -> Any:
        take = manager.get_result

        def get_result(timeout: float) -> Any:
            found = take(timeout=timeout)
            results.extend([] if found is None else [found])
            return found

        monkeypatch.setattr(manager, "get_result", get_result)
        answers = replay(manager, trace, rate)
        monkeypatch.setattr(manager, "get_result", take)
        return answers

    monkeypatch.setattr(serving, "_replay", recorded)
    traffic = ServeOptions("cpu", "float32", (50.0, 100.0), 4, (4, 20), (3, 6), seed=1)
    found = measure_serving(str(packed), traffic)
    assert [load.rate for load in found.loads] == [50, 100]
    assert (found.attention, found.requests, found.prompt_tokens) == ("sdpa", 4, (4, 20))
    for load in found.loads:
        assert 0 < load.first_token.p50 <= load.first_token.p99 <= load.end_to_end.p99
        assert load.token.p50 > 0 and load.served > 0 and load.decode > 0
    # What was answered: greedy tokens, as many as were asked for.
    model = quantkit.load(packed, device="cpu", dtype=torch.float32)
    trace = make_trace(4, (4, 20), (3, 6), 512, seed=1)
    assert len(results) == 2 + 4 + 4
    for result in results:
        request = trace[int(result.request_id.rpartition("-")[2])]
        ids = torch.tensor([request.prompt])
        expected = model.generate(
            ids, max_new_tokens=request.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        assert result.generated_tokens == expected[0, ids.shape[1] :].tolist()


def test_a_manager_that_stops_is_an_error() -> None:
    trace = make_trace(1, (4, 4), (2, 2), 10, seed=0)
    manager = SimpleNamespace(add_request=lambda *a, **k: None, get_result=lambda timeout: None)
    manager.is_running = lambda: False
    with pytest.raises(EnvironmentProblem, match="stopped: it ended without a message"):
        serving._replay(manager, trace, 1e6)
    manager.get_result = lambda timeout: SimpleNamespace(error="no room", request_id="x")
    with pytest.raises(EnvironmentProblem, match="stopped: no room"):
        serving._replay(manager, trace, 1e6)


@pytest.mark.parametrize(
    "wrong",
    [
        {"requests": 0},
        {"rates": (1.0, 0.0)},
        {"rates": (math.inf,)},
        {"prompt_tokens": (0, 4)},
        {"new_tokens": (9, 4)},
        {"dtype": "int3"},
    ],
)
def test_traffic_is_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServeOptions(**wrong)


def test_more_than_the_positions_is_refused(packed: Path) -> None:
    with pytest.raises(UsageError, match="up to 500 tokens with up to 64 new ones are more than the 512"):
        measure_serving(str(packed), ServeOptions("cpu", prompt_tokens=(4, 500)))


def test_models_that_continuous_batching_does_not_run_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Lfm2Config(**sizes, **heads, layer_types=["conv", "full_attention"])
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="has layers of conv, for which continuous batching"):
        measure_serving(str(tmp_path), ServeOptions("cpu", prompt_tokens=(4, 8), new_tokens=(4, 8)))

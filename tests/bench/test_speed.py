"""What is timed is what transformers generates, and figures count what they say; speed is not tested."""

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import StaticCache

import quantkit
from quantkit.bench import machine as machine_module
from quantkit.bench import speed
from quantkit.bench.bench_options import BenchOptions, Grid
from quantkit.bench.machine import EnergyMeter, cpu_name, used_bytes
from quantkit.bench.speed import (
    generate_timed,
    greedy_step,
    measure_speed,
    prompts_of,
    weight_bytes,
)
from quantkit.bench.worker import speed_of
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.runtime.cpu_steps.flat_forward import FlatForward
from quantkit.runtime.cuda_graphs import capture
from quantkit.runtime.cuda_graphs.capture import NotCaptured
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ..support.compare import assert_equal
from .conftest import SOURCE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_READ_BYTES", 1 << 20)


def test_what_is_timed_is_greedy_generation(packed: Path) -> None:
    model = quantkit.load(packed, device=DEVICE, dtype=torch.float32)
    prompt = prompts_of(BenchOptions(), packed, 512)(2, 9).to(DEVICE)
    cache = StaticCache(config=model.config, max_cache_len=9 + 7)
    eager = greedy_step(model, cache)
    seen: list[torch.Tensor] = []

    def step(tokens: torch.Tensor) -> torch.Tensor:
        seen.append(eager(tokens))
        return seen[-1]

    with torch.inference_mode():
        for _ in range(2):
            seen.clear()
            times = generate_timed(step, step, cache, prompt, 7)
            expected = model.generate(
                prompt, max_new_tokens=7, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            assert_equal(torch.cat(seen, 1), expected[:, 9:])
    assert len(times.between) == 6 and min(times.first, *times.between) > 0


def test_a_cache_with_another_name_is_used() -> None:
    config = transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    cache = StaticCache(config=model.config, max_cache_len=16)
    step, tokens = greedy_step(model, cache), torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        for _ in range(5):
            following = step(tokens if tokens.shape[1] == 3 else tokens[:, -1:])
            assert_equal(following, model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True))
            tokens = torch.cat([tokens, following], 1)


def test_figures_count_what_they_say(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that advances a second per reading every figure is known."""
    clock = iter(range(10_000))
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    found = measure_speed(
        str(packed),
        BenchOptions("cpu", batches=(1, 3), prompts=(4, 8), new_tokens=3, repeats=2),
        profile=None,
    )
    assert [(cell.batch, cell.prompt, cell.mode) for cell in found.cells] == [
        (batch, prompt, mode) for batch in (1, 3) for prompt in (4, 8) for mode in ("eager", "flat")
    ]
    for cell in found.cells:
        assert cell.first_token.median == cell.token_p50 == cell.token_p99 == 1
        assert cell.prefill.median == cell.batch * cell.prompt
        assert cell.decode.low == cell.decode.high == cell.batch
        assert cell.read_bandwidth == found.weight_bytes
        assert cell.joules is None
    # What is used before is that of the tests before, which may be let go of meanwhile.
    assert min(found.memory.before, found.memory.steady) > 0 and found.memory.steady <= found.memory.peak
    assert found.format.startswith("int4 g128")
    assert found.machine.name == cpu_name() and found.machine.read_bandwidth > 0
    assert (found.label, found.dtype) == ("int4", "float32")
    # Whatever this CPU unpacks.
    assert all(" are unpacked for every product at M=" in note for note in found.notes)


def test_asking_for_joules_is_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))

    def joules() -> float:
        # It takes as long as 99 readings of the clock.
        return float([next(clock) for _ in range(99)][-1])

    cache: Any = SimpleNamespace(reset=lambda: None)
    meter: Any = SimpleNamespace(joules=joules)
    prompt = torch.zeros(1, 4, dtype=torch.int64)
    times = generate_timed(lambda tokens: tokens[:, :1], lambda tokens: tokens, cache, prompt, 4, meter)
    assert times.first == 1 and times.between == [1, 1, 1] and times.joules > 99


@pytest.mark.parametrize("mode", ["eager", "cuda-graph"])
def test_what_is_timed_is_recorded_before(packed: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The prompt and the step, of a model that has graphs; none where kernels are launched one by one."""
    model = quantkit.load(packed, device="cpu")
    graph_decoding(model)
    recorded: list[int] = []
    before: list[int] = []
    timed = generate_timed

    def counted(step: Any, *_: Any) -> Any:
        recorded.append(1)
        return step(), lambda: None

    def counting(*arguments: Any) -> Any:
        before.append(len(recorded))
        return timed(*arguments)

    monkeypatch.setattr(capture, "capture", counted)
    monkeypatch.setattr(capture, "captures_on", lambda device: True)
    monkeypatch.setattr(speed, "generate_timed", counting)
    speed._cell(model, prompts_of(BenchOptions(), packed, 512)(2, 9), mode, 5, 4, None, EnergyMeter(CPU))
    assert before[-4:] == [len(recorded)] * 4
    assert (len(recorded) >= 2) is (mode != "eager")


def test_flat_steps_are_those_of_generate_or_the_reason_is_noted(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    real = FlatForward.step
    monkeypatch.setattr(FlatForward, "step", lambda *given: steps.append(1) or real(*given))
    settings = BenchOptions("cpu", batches=(1,), prompts=(4,), new_tokens=3, repeats=2)
    found = speed.measure_speed(str(packed), settings)
    assert [cell.mode for cell in found.cells] == ["eager", "flat"]
    # Two tokens of a generation that does not count, and of two that do.
    assert len(steps) == 6

    def fails(*_: Any) -> Any:
        raise NotCaptured("not today")

    monkeypatch.setattr("quantkit.runtime.cpu_steps.flat_forward.flat", fails)
    found = speed.measure_speed(str(packed), settings)
    assert [cell.mode for cell in found.cells] == ["eager"]
    assert "no flat steps at batch 1, prompt 4: not today" in found.notes


def test_weight_bytes_are_those_of_the_file(packed: Path) -> None:
    model = quantkit.load(packed, device="cpu")
    stored = Checkpoint.open(packed)
    shapes = sum(tensor.nbytes for name, tensor in stored.tensors.items() if name.endswith("_shape"))
    # The head is tied: the embedding is read as such, once.
    assert weight_bytes(model) == stored.nbytes - shapes
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    assert weight_bytes(model) == stored.nbytes - shapes
    model.model.layers[0].add_module("experts", torch.nn.Identity())
    assert weight_bytes(model) is None


def test_prompts_follow_the_seed_or_repeat_the_text(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = prompts_of(BenchOptions(seed=1), packed, 512)
    assert_equal(draw(3, 20), draw(3, 20))
    assert not torch.equal(draw(3, 20), prompts_of(BenchOptions(seed=2), packed, 512)(3, 20))
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    tokens = prompts_of(BenchOptions(text=str(text)), packed, 512)(2, 10)
    stream = tokens.flatten().tolist()
    length = next(n for n in range(1, 20) if stream[n:] == stream[:-n])
    assert 1 < length < 10, "it begins anew"
    monkeypatch.setattr(speed, "tokenize", lambda *_: torch.empty(0, dtype=torch.int64))
    with pytest.raises(UsageError, match="has no tokens"):
        prompts_of(BenchOptions(text=str(text)), packed, 512)


def test_grid_within_the_positions() -> None:
    grid = Grid((1,), (16, 100, 200), 20, ("eager",))
    assert grid.within(None) == (grid, ())
    assert grid.within(220) == (grid, ())
    cut, notes = grid.within(120)
    assert cut.prompts == (16, 100)
    assert notes == (
        "prompts of 200 tokens were left out: with 20 new ones they are more than the 120 positions of the "
        "model",
    )
    with pytest.raises(
        UsageError, match="has 30 positions, and the shortest prompt of 16 with 20 new tokens"
    ):
        grid.within(30)


@pytest.mark.parametrize(
    "wrong",
    [
        {"batches": (0,)},
        {"prompts": (4, 0)},
        {"repeats": 0},
        {"new_tokens": 1},
        {"dtype": "int3"},
        {"modes": ("eager", "fast")},
        {"modes": ()},
    ],
)
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        BenchOptions(**wrong)


def test_a_cpu_measures_less_by_default() -> None:
    assert BenchOptions().on(CPU) == Grid((1,), (32, 128), 32, ("eager", "flat"), 3)
    assert BenchOptions(repeats=4, batches=(2,)).on(CPU).repeats == 4
    assert BenchOptions().on(torch.device("cuda")).repeats == 5


def test_modes_are_those_of_the_device_or_the_ones_asked_for() -> None:
    assert BenchOptions().on(torch.device("cuda")).modes == ("eager", "cuda-graph")
    assert BenchOptions().on(torch.device("cpu")).modes == ("eager", "flat")
    asked = BenchOptions(modes=("cuda-graph",))
    assert asked.on(torch.device("cuda")).modes == ("cuda-graph",)
    with pytest.raises(UsageError, match="a cpu has no cuda-graph: it runs eager and flat only"):
        asked.on(torch.device("cpu"))


def test_a_fresh_process_gives_the_same_kind_of_figures(packed: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    estimates: list[float] = []
    trace = tmp_path / "trace.json"
    found = speed_of(
        str(packed),
        BenchOptions("cpu", batches=(1,), prompts=(4, 600), new_tokens=3, repeats=1),
        profile=trace,
        progress=lambda *line: told.append(line),
        estimated=estimates.append,
    )
    assert [line[:2] for line in told] == [(done, 4) for done in (0, 1, 2, 3)]
    assert [line[2].partition(" left")[0].rpartition(", ")[0] for line in told[1:]] == [
        f"int4: batch 1, prompt 4, {mode}" for mode in ("eager", "flat", "flat")
    ]
    assert len(estimates) == 1 and estimates[0] > 0
    assert len(found.cells) == 2 and found.notes[0].startswith("prompts of 600 tokens were left out")
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("quantkit" in str(event.get("name")) for event in events)
    # Libraries are resident there, and little else.
    assert found.memory.before < used_bytes(CPU) * 3


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="signals that are ignored are in /proc")
def test_errors_of_a_fresh_process_are_those_of_this_one_and_ctrl_c_is_not_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import quantkit.bench.worker as worker

    ended = []

    class Interrupted(subprocess.Popen[str]):
        """Gets Ctrl-C at once, and may end by itself."""

        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            blocked = int(Path(f"/proc/{self.pid}/status").read_text().split("SigBlk:")[1].split()[0], 16)
            assert blocked >> (signal.SIGINT - 1) & 1
            self.send_signal(signal.SIGINT)

        def kill(self) -> None:
            ended.append(self.wait())

    monkeypatch.setattr(worker, "subprocess", SimpleNamespace(Popen=Interrupted, PIPE=subprocess.PIPE))
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        speed_of(str(tmp_path), BenchOptions("cpu"))
    assert ended == [0] and "Traceback" not in capfd.readouterr().err


def test_a_killed_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import quantkit.bench.worker as worker
    from quantkit.errors import EnvironmentProblem

    monkeypatch.setattr(worker, "_PROGRAM", "import os, sys; sys.stdin.read(); os.kill(os.getpid(), 9)")
    with pytest.raises(EnvironmentProblem, match="ended with status -9"):
        speed_of(str(SOURCE), BenchOptions("cpu"))


def test_energy_comes_from_the_counter_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EnergyMeter(CPU).joules() is None
    gpu = torch.device("cuda")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert EnergyMeter(gpu).joules() is None, "pynvml is not installed"

    class NVMLError(Exception):
        pass

    millijoules = iter([1000, 5000, 7500])
    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: next(millijoules),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2"))
    meter = EnergyMeter(gpu)
    assert (meter.joules(), meter.joules()) == (5.0, 7.5)

    def refuse(handle: str) -> int:
        raise NVMLError

    fake.nvmlDeviceGetTotalEnergyConsumption = refuse
    assert EnergyMeter(gpu).joules() is None

"""Budgets of time: what linears cost by a table of measured times, and what is said where it has none."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.kernels.problem import Gpu
from quantkit.kernels.registry import KERNELS
from quantkit.kernels.tuning.store import save
from quantkit.kernels.tuning.tile_table import Entry, Key, TileTable, as_computed
from quantkit.model.structure import Linear, read_structure
from quantkit.packing.schemes import Scheme, scheme
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.allocate import allocate as allocating
from quantkit.quantization.allocate.allocation import Allocation
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget, MillisecondsPerToken, launches
from quantkit.quantization.allocate.sensitivity import Sensitivities
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize

from ...tiny.calibrated import data, write

GPU = Gpu("Test GPU 3000", (9, 0), 132, 227 << 10)
FORMATS = ("int3:32", "int4:32", "int5:32", "int8")
SCHEMES = tuple(scheme(name, group_size=size) for name, size in (("int4", 32), ("int5", 32), ("int8", None)))

Times = dict[tuple[str, int, int], float]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own for each test."""
    torch.set_num_threads(1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def store_times() -> Callable[..., Times]:
    """Store a table of times for a checkpoint's linears in all but int3, of which it has none."""

    def store(source: Path, without: tuple[tuple[str, int], ...] = (), dtype: Any = torch.bfloat16) -> Times:
        numbers, times, entries = random.Random(0), Times(), {}
        for linear in read_structure(Checkpoint.open(source)).linears.values():
            n, k = linear.shape
            for one in SCHEMES:
                # As tables are written: four digits.
                us = float(f"{numbers.uniform(2, 200):.4g}")
                if (one.format.name, k) not in without and (one.format.name, n, k) not in times:
                    times[one.format.name, n, k] = us
                    entries[Key(as_computed(one, k), dtype, n, k, 1)] = Entry(us, "dequantize")
                    entries[Key(as_computed(one, k), dtype, n, k, 2)] = Entry(1000.0, "dequantize")
        save(TileTable(GPU, {"quantkit": "0.1.0"}, entries), KERNELS)
        return times

    return store


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sensitivities that are not measured: fewer bits cost more."""

    def measure(decoder: Any, schemes: dict[str, list[Scheme]], *_: object) -> Sensitivities:
        return Sensitivities(
            {name: tuple(4.0**-one.format.bits for one in row) for name, row in schemes.items()}, {}
        )

    monkeypatch.setattr(allocating, "measure", measure)


def planned(source: Path, text: Path, amount: float, **options: Any) -> Any:
    budget = Budget(MillisecondsPerToken(amount, "Test GPU 3000"), FORMATS)
    return plan(source, QuantizeOptions(budget=budget, calibration=data(text), **options))[1]


def microseconds(times: Times, structure: Any, allocation: Allocation, chosen: int = 2) -> float:
    """By a loop over linears, experts and halves."""
    total = 0.0
    for share in allocation.shares:
        for name in share.linears:
            time = times[(share.scheme.split()[0], *structure.linears[name].shape)]
            for _ in range(chosen if ".experts." in name else 1):
                total += 2 * time if name.endswith("experts.gate_up_proj") else time
    return total


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe"])
def test_times_are_kept_to_the_nanosecond(
    tmp_path: Path, text: Path, store_times: Callable[..., Times], family: str
) -> None:
    source = write(tmp_path, family)
    times, structure = store_times(source), read_structure(Checkpoint.open(source))
    with pytest.raises(
        UsageError, match=r"1e-06 milliseconds per token on Test GPU 3000 are out of reach"
    ) as e:
        planned(source, text, 1e-6)
    least, most = (
        float(word.strip(",")) for word in str(e.value).split() if word[0].isdigit() and "." in word
    )
    divergences = []
    for part in (0.0, 0.3, 0.6):
        amount = round(least + part * (most - least), 6)
        found = planned(source, text, amount).allocation
        assert found.cost <= found.allowed == round(amount * 1e6)
        assert found.cost == round(1e3 * microseconds(times, structure, found))
        divergences.append(found.divergence)
    assert divergences == sorted(divergences, reverse=True) and divergences[0] > divergences[-1]
    assert Allocation.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert found.to_dict()["asked"] == {"milliseconds_per_token": amount, "gpu": "Test GPU 3000"}


@pytest.mark.usefixtures("losses")
def test_formats_without_a_time_are_left_out_and_named(
    tmp_path: Path, text: Path, store_times: Callable[..., Times]
) -> None:
    source = write(tmp_path)
    store_times(source, without=(("int5", 84),))
    found = planned(source, text, 1.8)
    assert found.notes[0] == (
        "the milliseconds per token on Test GPU 3000 of some formats are not known, so these are not chosen: "
        "int3 g32 bfloat16, int5 g32 bfloat16 at 64x84; int3 g32 bfloat16 at 84x64, 32x64, 64x64. On that "
        "GPU `quantkit tune` measures them: for a packed checkpoint that has them or, with scales of the "
        "format's own dtype, by --shapes and --formats."
    )
    chosen = {name: share.scheme.split()[0] for share in found.allocation.shares for name in share.linears}
    assert {one for name, one in chosen.items() if "down_proj" in name} <= {"int4", "int8"}
    assert "int5" in chosen.values() and "int3" not in chosen.values()

    store_times(source, without=(("int5", 84), ("int4", 84), ("int8", 84)))
    with pytest.raises(
        UsageError,
        match=r"no format to choose for model\.layers\.0\.mlp\.down_proj \(64x84\): the milliseconds per "
        r"token on Test GPU 3000 of none is known\. .*`quantkit tune`.* --rule 'model\.layers\.0\.mlp\.down",
    ):
        planned(source, text, 1.0)


@pytest.mark.usefixtures("losses")
def test_times_are_those_of_the_dtype_of_the_weights(
    tmp_path: Path, text: Path, store_times: Callable[..., Times]
) -> None:
    source = write(tmp_path, dtype=torch.float16)
    store_times(source)
    with pytest.raises(UsageError, match="there is no format to choose"):
        planned(source, text, 1.0)


def test_a_run_within_a_time_and_what_is_resumed(
    tmp_path: Path, text: Path, store_times: Callable[..., Times]
) -> None:
    source, out = write(tmp_path, "qwen3_moe", num_hidden_layers=2), tmp_path / "out"
    store_times(source)
    budget = Budget(MillisecondsPerToken(2.0, "test_gpu_3000"), FORMATS)
    first = quantize(source, out, budget=budget, calibration=data(text))
    assert first.plan.allocation is not None and first.plan.allocation.cost <= 2_000_000
    run = json.loads((out / "quantkit_manifest.json").read_text())["run"]["allocation"]
    assert run["budget"] == {"milliseconds_per_token": 2.0, "gpu": "test_gpu_3000", "formats": list(FORMATS)}
    again = quantize(source, out, budget=budget, calibration=data(text), resume=True)
    assert again.plan.allocation == first.plan.allocation


def test_experts_are_launched_one_by_one(tmp_path: Path) -> None:
    source = write(tmp_path, "qwen2_moe", num_experts_per_tok=3)
    checkpoint = Checkpoint.open(source)
    linears = read_structure(checkpoint).linears
    found = {
        name.split(".", 3)[3]: launches(checkpoint, linears[name]) for name in linears if ".0.mlp" in name
    }
    assert found == {
        "mlp.experts.gate_up_proj": 6,
        "mlp.experts.down_proj": 3,
        **{f"mlp.shared_expert.{leaf}_proj": 1 for leaf in ("gate", "up", "down")},
    }
    checkpoint.config["text_config"] = {"moe_topk": checkpoint.config.pop("num_experts_per_tok")}
    assert launches(checkpoint, Linear("a.experts.down_proj", "experts", ("a", "b"), (8, 8))) == 3
    del checkpoint.config["text_config"]
    with pytest.raises(UsageError, match=r"'num_experts_per_tok' is None; .* --rule 'a\.experts\.\*=int4'"):
        launches(checkpoint, Linear("a.experts.down_proj", "experts", ("a", "b"), (8, 8)))


def test_there_is_no_gpu_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match=r"there is no GPU here to decode on\. Name .* --gpu nvidia_h200"):
        MillisecondsPerToken.here(1.0)


@pytest.mark.parametrize("amount", [0.0, -1.0, float("nan"), float("inf")])
def test_budgets_are_numbers(amount: float) -> None:
    with pytest.raises(UsageError, match=r"bits per weight are no budget; use a number such as 4\.5"):
        BitsPerWeight(amount)
    with pytest.raises(
        UsageError, match=r"milliseconds per token on a are no budget; use a number such as 2\.5"
    ):
        MillisecondsPerToken(amount, "a")


def test_the_shipped_times_are_enough_for_the_models_they_are_of(tmp_path: Path) -> None:
    """Of Llama-3 8B and Mixtral: int4, int5, int6 and int8 at every shape."""
    checkpoint = Checkpoint.open(write(tmp_path))
    price = MillisecondsPerToken(1.0, "NVIDIA H200").price(checkpoint)
    stored = (next(iter(checkpoint.tensors)).removesuffix(".weight"),)
    for name in ("int4", "int5", "int6", "int8", "fp8", "mxfp4", "nvfp4"):
        for shape in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)):
            ns = price(Linear("a", "linear", stored, shape), scheme(name).for_columns(shape[1]))
            assert ns is not None and 2_000 < ns < 40_000

"""Memory of a training: what is stated is what it holds, and all ways to train give the same bits."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.errors import EnvironmentProblem
from quantkit.model.distributed import Ranks
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.blockwise import calibration
from quantkit.quantization.blockwise.calibration import Calibration, calibrate
from quantkit.quantization.distill import distill, loss, stacking, training, training_memory
from quantkit.quantization.distill.build_student import build_student
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.distillation import Distillation
from quantkit.quantization.distill.pool import Pool
from quantkit.quantization.distill.residence import Residence
from quantkit.quantization.distill.training import Training
from quantkit.quantization.distill.training_memory import Sizes, Way, check_host, choose, least
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.recipes.recipe_options import RecipeOptions

from ...support.live_bytes import LiveBytes
from ...tiny.calibrated import interrupted_at, write

CPU = torch.device("cpu")
#: Widths of Llama-3 8B over 32, and another kind of model.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        **{"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4, "head_dim": 32},
        "num_hidden_layers": 4,
    },
    "mixtral": {"num_hidden_layers": 2},
    "tied": {"num_hidden_layers": 2},
}


@pytest.fixture
def prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[Distillation, Path]:
    """A distillation whose calibration is done in a directory."""
    family, dtype = request.param
    for module in (calibration, training_memory):
        monkeypatch.setattr(module, "compute_dtype", lambda *_: dtype)
    source = write(tmp_path, family, **MODELS[family])
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(33 + (i * i * 7 + i // 3) % 90) for i in range(64 * 40)))
    recipe = RecipeOptions(format="int2", group_size=32, method="mse,distill")
    asked = QuantizeOptions(recipe, calibration=CalibrationOptions(str(text), 4, 64))
    checkpoint, planned = plan(source, asked)
    calibrated = Calibration.of(checkpoint, planned, asked.calibration, CPU)
    one = Distillation.of(checkpoint, planned, calibrated, asked, Ranks())
    assert one is not None and calibrated is not None
    out = tmp_path / "out"
    with OutputDirectory.open(out, checkpoint.directory, Mode.NEW, {}, 1 << 20) as output:
        calibrate([one.filename for one in planned.shards], calibrated, output, out, Ranks(), lambda *_: None)
    return one, out


def trained(one: Distillation, out: Path, way: Way, steps: int) -> Training:
    """A training of some steps."""
    decoder = one.calibrated.decoder
    student = build_student(
        decoder.whole(),
        decoder,
        one.calibrated.blocks,
        one.planned,
        one.linears,
        one.norms,
        out,
        Residence(CPU, way.on_host),
    )
    if way.compute_again:
        student.compute_again()
    options = DistillOptions(steps, batch=8, own=0.0)
    pool = Pool.of(one.text.tokens, one.text.tokens[:0], 0)
    found = Training(student, pool, options, way.micro, Ranks())
    found.run(lambda: 0.0, lambda at: None)
    return found


@pytest.mark.parametrize("prepared", [(family, torch.float32) for family in MODELS], indirect=True)
def test_all_ways_give_the_same_bits(
    prepared: tuple[Distillation, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (training, training_memory):
        monkeypatch.setattr(module, "CHUNK_WEIGHTS", 10_000)
    kept = None
    for way in (Way(4), Way(4, on_host=True), Way(4, compute_again=True), Way(4, True, True)):
        found = trained(*prepared, way, 3)
        state = {**found.state(), **dict(found.student.weights.leaves)}
        assert kept is None or kept.keys() == state.keys()
        for name, tensor in state.items():
            assert kept is None or torch.equal(tensor, kept[name]), (way, name)
        kept = state
    other = trained(*prepared, Way(8), 3).state()
    assert not all(torch.equal(tensor, kept[name]) for name, tensor in other.items())


@pytest.mark.sampled(2, "prepared", "way")
@pytest.mark.parametrize("prepared", [("llama", torch.bfloat16), ("mixtral", torch.bfloat16)], indirect=True)
@pytest.mark.parametrize(
    ("way", "chunk"),
    [
        (Way(4), 1 << 16),
        (Way(8), 1 << 16),
        (Way(8, compute_again=True), 1 << 16),
        (Way(2, True, True), 1 << 16),
        # Most is held while weights move.
        (Way(1, compute_again=True), 1 << 20),
        (Way(1, True, True), 1 << 20),
    ],
    ids=str,
)
def test_a_training_holds_what_the_plan_says(
    prepared: tuple[Distillation, Path], monkeypatch: pytest.MonkeyPatch, way: Way, chunk: int
) -> None:
    one, out = prepared
    for module in (training, training_memory):
        monkeypatch.setattr(module, "CHUNK_WEIGHTS", chunk)
    monkeypatch.setattr(stacking, "STACK_WEIGHTS", chunk)
    monkeypatch.setattr(loss, "CHUNK_LOGITS", 1 << 13)
    most = min(chunk, one.sizes.weights)
    sizes = replace(one.sizes, moved=most, largest=most)
    with LiveBytes() as live:
        trained(one, out, way, 2)
    # Host memory is that of the device here.
    held = live.most - way.on_host * sizes.numbers
    assert 0.6 * way.nbytes(sizes) < held <= way.nbytes(sizes)


#: Llama-3 8B on a GPU, in sequences of 2048 tokens.
EIGHT = Sizes(
    **{"kind": "cuda", "model": 16_060_522_496, "student": 13_958_643_712, "gradients": 13_958_643_712},
    **{"numbers": 57_143_197_696, "pinned": 63_000_000_000, "weights": 6_979_321_856},
    **{"matrix": 31_157_686, "moved": 67_108_864},
    **{"largest": 58_720_256, "blocks": 32, "per_block": 192_512, "per_input": 8192, "per_logits": 1_026_048},
    length=2048,
)
#: A small model: launches take longer than its products.
SMALL = replace(
    EIGHT,
    **{"model": 60 * 10**6, "student": 40 * 10**6, "gradients": 40 * 10**6, "numbers": 170 * 10**6},
    **{"weights": 20 * 10**6, "matrix": 440_000, "moved": 20 * 10**6, "largest": 10**6, "blocks": 8},
    **{"per_block": 22_000, "per_input": 1024, "per_logits": 64_000, "length": 512},
)


@pytest.mark.parametrize(
    ("gigabytes", "way"),
    [
        (300, Way(2)),
        (141, Way(1)),
        (80, Way(1, on_host=True)),
        (55, Way(1, on_host=True, compute_again=True)),
        # None fits: the one with least.
        (24, Way(1, on_host=True, compute_again=True)),
    ],
)
def test_the_way_of_8b_is_the_fastest_that_fits(gigabytes: float, way: Way) -> None:
    found = choose(EIGHT, 64, gigabytes * 1e9)
    assert found == way
    assert gigabytes < 55 or found.nbytes(EIGHT) < 0.9 * gigabytes * 1e9 - 1.2e9


def test_ways_by_what_they_cost() -> None:
    # Small products want large micro-batches, large ones do not.
    assert choose(SMALL, 64, math.inf).micro == 64 and choose(EIGHT, 64, math.inf).micro < 16
    assert 4 < choose(SMALL, 64, 6e9).micro < 64
    # With room for all, numbers stay on the device, few as they are.
    tiny = replace(SMALL, numbers=10**6)
    assert not any(choose(one, 64, 144e9).on_host for one in (tiny, SMALL, replace(EIGHT, numbers=10**6)))
    # A short batch is not worth transfers of all numbers.
    assert choose(EIGHT, 64, 80e9).on_host
    assert not choose(replace(EIGHT, numbers=10**10, length=64), 8, 80e9).on_host
    # A resumed run keeps its micro-batch, whatever is free.
    assert {choose(EIGHT, 64, free * 1e9, micro=3).micro for free in (10, 60, 90, 300)} == {3}
    # On a CPU nothing goes to the host, whose memory it is.
    on_cpu = replace(EIGHT, kind="cpu")
    assert not any(choose(on_cpu, 8, free * 1e9).on_host for free in (10, 60, 90, 300))
    assert choose(on_cpu, 8, 60e9).compute_again and not choose(on_cpu, 8, 300e9).compute_again
    assert least(EIGHT, 64) == Way(1, on_host=True, compute_again=True)
    assert least(EIGHT, 64).nbytes(EIGHT) < 50e9 and least(SMALL, 64).micro > 8


def test_the_host_must_have_room_for_numbers() -> None:
    gpu = torch.device("cuda", 1)
    for way, free in ((Way(1), 0), (Way(1, on_host=True), 64 * 10**9)):
        check_host(way, EIGHT, free, 1, gpu, 80 * 10**9)
    with pytest.raises(EnvironmentProblem) as raised:
        check_host(Way(1, on_host=True), EIGHT, 30 * 10**9, 1, gpu, 80 * 10**9)
    text = str(raised.value)
    assert "would keep 63.00 GB of latent numbers and Adam's means in host memory, where 30.00 GB" in text
    assert "cuda:1 has 80.00 GB free, and would need 116" in text and "--resume" in text
    with pytest.raises(EnvironmentProblem, match=r"where 30\.00 GB are free for each of 8 processes; cuda:1"):
        check_host(Way(1, on_host=True), EIGHT, 30 * 10**9, 8, gpu, 80 * 10**9)


@pytest.mark.parametrize("prepared", [("llama", torch.float32), ("mixtral", torch.float32)], indirect=True)
def test_pinned_memory_comes_in_powers_of_two(prepared: tuple[Distillation, Path]) -> None:
    sizes = prepared[0].sizes
    assert sizes.numbers <= sizes.pinned < 2 * sizes.numbers


def test_the_vocabulary_is_no_width_of_a_block(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "llama", vocab_size=3000)

    def sizes_of(**recipe: Any) -> Sizes:
        options = QuantizeOptions(RecipeOptions(format="int2", method="distill", group_size=16, **recipe))
        found = Sizes.of(*plan(source, options), 64, CPU)
        assert found is not None
        return found

    dense, head, embedding = sizes_of(), sizes_of(lm_head="int4:16"), sizes_of(embeddings="int4:16")
    assert dense.per_block == head.per_block == embedding.per_block
    assert dense.blocks == head.blocks == embedding.blocks


def test_recipes_of_experts_alone(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "mixtral", num_local_experts=4)
    options = RecipeOptions(format="int2", method="distill", group_size=16, rules=("*self_attn*=keep",))

    def sizes() -> Sizes:
        found = Sizes.of(*plan(source, QuantizeOptions(options)), 64, CPU)
        assert found is not None
        return found

    config = json.loads((source / "config.json").read_text())
    stated = sizes()
    without = {name: value for name, value in config.items() if name != "num_experts_per_tok"}
    (source / "config.json").write_text(json.dumps(without))
    of_expert = 4 * config["hidden_size"] + 4 * config["intermediate_size"]
    assert sizes().per_block - stated.per_block == 4 * (4 - 2) * of_expert


def test_what_is_said_of_a_way() -> None:
    text = Way(4, True, True).text(EIGHT, 80 * 10**9, torch.device("cuda", 0))
    assert "of the 80.00 GB free on cuda:0; latent numbers and Adam's means, 57.14 GB, stay in host" in text
    assert "activations are computed twice" in text and "4 sequences of 2048 tokens" in text
    assert "host" not in Way(4).text(EIGHT, 200 * 10**9, torch.device("cuda", 0))


@pytest.mark.parametrize("prepared", [("llama", torch.float32)], indirect=True)
def test_a_resumed_run_keeps_its_micro_batch(
    prepared: tuple[Distillation, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, out = prepared
    one = replace(one, options=DistillOptions(4, batch=8, own=0.0))
    monkeypatch.setattr(distill, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(distill, "STATE_PART", math.inf)
    micro = []
    for free in (1 << 40, 0):
        monkeypatch.setattr(distill, "free_share", lambda *_, free=free: free)
        with OutputDirectory.open(out, out.parent / "llama-source", Mode.RESUME, {}, 1 << 20) as output:
            stored = distill._stored(one, output)
            assert stored is not None
            way = distill._way(one, distill.Stored(**stored))
            micro.append(way.micro)
            assert way.compute_again == (free == 0)
            with pytest.raises(KeyboardInterrupt):
                distill.distill(one, output, out, interrupted_at(2))
    assert micro == [8, 8]
    assert any("activations are computed twice" in text for text in caplog.messages)
    assert choose(one.sizes, 8, 0).micro == 1

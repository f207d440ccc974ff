"""First runs, whose kernels are being compiled: what they leave undefined is in no result."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, StaticLayer

from quantkit.kernels.jit.compile_pool import COMPILERS, Compilers
from quantkit.kernels.jit.launcher import Launch
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.cuda_graphs import decode as decode_graphs
from quantkit.runtime.cuda_graphs import prefill, warmup
from quantkit.runtime.cuda_graphs.decode import plain_forward
from quantkit.runtime.decoding import forward_of
from quantkit.runtime.passes import fused_forward
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ..graphed import DEVICE, close, count_recordings, decode, decode_whole, ids, made
from ..passes.test_fuse_moe import FAMILIES as EXPERTS

pytest.importorskip("triton")

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Gemma2": {"head_dim": 16, "sliding_window": 5},
    **{name: EXPERTS[name] for name in ("Mixtral", "Glm4Moe")},
}


class _Compiling(Compilers):
    """No kernel is there but those whose results are indices."""

    def __init__(self) -> None:
        super().__init__()
        self.left_out = 0

    def kernel(self, known: Any, compile_kernel: Callable[[], Any], needed: bool) -> Any:
        if needed:
            return compile_kernel() if known is None else known
        self.left_out += 1
        return None


class _Interpreted:
    """What the interpreter has in place of the compiled kernel of a launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        known = len(self.launch._known)
        run = self.launch._kernel[grid]
        return lambda *arguments: run(*arguments[: len(arguments) - known], **self.launch._options)


@pytest.fixture
def left_out(monkeypatch: pytest.MonkeyPatch, interpreter: bool) -> Iterator[list[int]]:
    """How many launches each run left out that did; memory nobody wrote is full of NaN and large numbers."""
    found: list[int] = []

    def compiled_first(
        device: torch.device,
        run: Callable[[], Any],
        rewind: Callable[[], None] | None = None,
        ahead: Callable[[Any], object] | None = None,
    ) -> Any:
        compilers = _Compiling()
        token = COMPILERS.set(compilers)
        try:
            result = run()
            if ahead is not None and compilers.left_out:
                if rewind is not None:
                    rewind()
                before = compilers.left_out
                ahead(result)
                assert compilers.left_out > before
        finally:
            COMPILERS.reset(token)
        if not compilers.left_out:
            return result
        found.append(compilers.left_out)
        if rewind is not None:
            rewind()
        return run()

    monkeypatch.setattr(Launch, "_compile", lambda launch, arguments: _Interpreted(launch))
    for module in (fused_forward, prefill):
        monkeypatch.setattr(module, "compiled_first", compiled_first)
    monkeypatch.setattr(fused_forward, "can_fuse", lambda device: True)
    fused_forward.warn_unchanged.cache_clear()
    count_recordings(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    torch.use_deterministic_algorithms(True)
    yield found
    torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are interpreted")
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_those_of_a_warm_start(
    family: str, left_out: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = made(family, **FAMILIES[family])
    expected = decode_whole(model, ids(), 4)
    graph_decoding(model)
    found = decode(model, forward_of(model), static_cache(model, 40), ids(), steps=4)
    close(found, expected)
    assert left_out and not any("more launches" in message for message in caplog.messages)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are interpreted")
@torch.no_grad()
def test_prompts_are_those_of_a_warm_start(left_out: list[int], caplog: pytest.LogCaptureFixture) -> None:
    model = made("Llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    expected = model(input_ids=ids(), use_cache=False).logits[:, -1:]
    graph_decoding(model)
    for _ in range(3):
        output = model(input_ids=ids(), past_key_values=DynamicCache(), use_cache=True, logits_to_keep=1)
        close(output.logits, expected)
        assert all(layer.keys.isfinite().all() for layer in output.past_key_values.layers)
    assert left_out and not any("more launches" in message for message in caplog.messages)


@pytest.mark.skipif(DEVICE == "cuda", reason="kernels are interpreted")
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_step_that_is_tried_launches_what_steps_do(
    family: str, left_out: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched, call = set(), Launch.__call__

    def noted(launch: Launch, *arguments: Any) -> None:
        shapes = [a.dtype if isinstance(a, torch.Tensor) else a % 16 for a in arguments]
        launched.add((launch._kernel.fn.__name__, repr(launch._options), repr(shapes)))
        call(launch, *arguments)

    model = made(family, **FAMILIES[family])
    graph_decoding(model)
    forward, cache = plain_forward(model), static_cache(model, 40)
    monkeypatch.setattr(Launch, "__call__", noted)
    caches: list[Any] = []
    monkeypatch.setattr(warmup, "Cache", lambda **known: caches.append(Cache(**known)) or caches[-1])
    prompt = {"input_ids": ids(), "position_ids": torch.arange(9).expand(2, 9)}
    warmup.warm_up(model, forward, prompt | {CACHE: cache})
    tried = launched.copy()
    assert tried and not any(layer.is_initialized for layer in cache.layers)
    (layers,) = (one.layers for one in caches)
    assert all(part.untyped_storage().nbytes() == 0 for one in layers for part in (one.keys, one.values))
    launched.clear()
    # Prompts have launches of their own: those of a cache that grows are not tried.
    warmup.warm_up(model, forward, prompt | {CACHE: DynamicCache()})
    warmup.warm_up(model, forward, prompt | {CACHE: Cache(layers=[StaticLayer(max_cache_len=2)] * 2)})
    assert not launched
    monkeypatch.setattr(fused_forward, "compiled_first", lambda device, run, *_, **__: run())
    step, recorded = fused_forward.fused_forward, []

    def of_steps(*arguments: Any) -> Any:
        launched.clear()
        recorded.append(step(*arguments))
        return recorded[-1]

    monkeypatch.setattr(decode_graphs, "fused_forward", of_steps)
    model.generate(ids(), max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert recorded and launched == tried


START = """
import sys
import torch
import quantkit
from quantkit.kernels.jit import compile_pool

attempts, attempt = [], compile_pool._attempt
compile_pool._attempt = lambda *arguments: (attempts.append(attempt(*arguments)), attempts[-1])[1]

model = quantkit.load(sys.argv[1], device="cuda", dtype=torch.bfloat16)
ids = torch.arange(40, device="cuda")[None] * 7 % 90
options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
for _ in range(3):
    print(model.generate(ids, **options).tolist())
print("left out:", sum(one is None for one in attempts), file=sys.stderr)
"""


@pytest.mark.skipif(DEVICE != "cuda", reason="a CPU compiles no kernels")
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_a_cold_start_on_a_gpu_gives_the_tokens_of_a_warm_one(tiny: Any, tmp_path: Path, model: str) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
    }
    command = [sys.executable, "-c", START, str(tiny(model, "int4").packed)]
    cold, warm = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        for _ in range(2)
    )
    assert (cold.returncode, warm.returncode) == (0, 0), cold.stderr + warm.stderr
    assert cold.stdout == warm.stdout and len(set(cold.stdout.splitlines())) == 1
    # Triton 3.9's bindings write lines of their own when Python ends.
    left_out = [int(re.findall(r"^left out: (\d+)$", done.stderr, re.M)[0]) for done in (cold, warm)]
    assert left_out[0] > 0 and left_out[1] == 0

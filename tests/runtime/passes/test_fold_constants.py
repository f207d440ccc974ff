"""What a step computes before its first norm: constants once, ids, positions and masks in few launches."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import is_tensor

from quantkit.kernels.ops import kv_append, rope
from quantkit.kernels.ops.norm import rms_norm
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.decoding import forward_of
from quantkit.runtime.passes import fold_constants, fused_forward
from quantkit.runtime.passes.fold_constants import folded_constants
from quantkit.runtime.passes.patterns import fused
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ...support.compare import assert_equal
from ..graphed import (
    DEVICE,
    close,
    count_recordings,
    decode,
    decode_whole,
    ids,
    keep_modules,
    made,
    numbers,
    only,
    step_of,
)

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("interpreter")

#: A function of tensors that makes others of numbers alone.
Step = Callable[..., Any]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What steps became."""
    monkeypatch.setattr(fused_forward, "can_fuse", lambda device: True)
    count_recordings(monkeypatch)
    return keep_modules(monkeypatch)


def held(step: Step, *given: torch.Tensor) -> list[torch.Tensor]:
    return folded_constants(fused(step, [tensor.clone() for tensor in given], "steps"))


@torch.no_grad()
def test_what_is_computed_of_numbers_alone_is_computed_once() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(5, device=x.device)
        shown = steps[:, None] >= (steps + 1)[None]
        shift = torch.full((5,), 2.0, device=x.device).cumsum(0)
        return x.where(shown, torch.zeros((), device=x.device)) * shift + steps.unsqueeze(0)

    found = step_of(numbers(5, 5))(step)
    assert found == {"where.self": 1, "mul.Tensor": 1, "add.Tensor": 1}
    # The mask, zero, the shift and the steps as they are added; nothing that these are made of.
    assert sorted(tuple(one.shape) for one in held(step, numbers(5, 5))) == [(), (1, 5), (5,), (5, 5)]


@torch.no_grad()
def test_constants_are_those_of_each_device_and_dtype_and_of_later_calls() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(3, device=x.device).to(torch.float16)

    module = fused(step, [numbers(2, 3)], "steps")
    (constant,) = folded_constants(module)
    assert constant.dtype == torch.float16 and constant.device == numbers(1).device
    for seed in range(3):
        x = numbers(2, 3) + seed
        assert_equal(module(x), step(x))
    (node,) = module.graph.find_nodes(op="get_attr", target="folded_0")
    assert node.meta["val"].dtype == torch.float16 and node.meta["val"].is_meta


def writes(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(3, device=x.device)
    total.add_(x)
    return total * 2


def writes_a_view(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(2, 3, device=x.device)
    before = total + 1
    total[0].copy_(x)
    return before + total


def counts(x: torch.Tensor) -> torch.Tensor:
    counter = torch.zeros(3, device=x.device)
    y = x + counter
    counter.add_(1)
    return y


def writes_by_name(x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(3, device=x.device)
    torch.add(x, 1.0, out=total)
    return total * 2


def writes_several(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.ones(3, device=x.device), torch.ones(3, device=x.device)]
    torch._foreach_mul_(parts, [x, x])
    return parts[0] + parts[1]


@torch.no_grad()
@pytest.mark.parametrize("step", [writes, writes_a_view, counts, writes_by_name, writes_several])
def test_what_is_written_is_no_constant(step: Step) -> None:
    x = numbers(3)
    module = fused(step, [x], "steps")
    for _ in range(3):
        assert_equal(module(x), step(x))
    assert all(tensor.dim() == 0 for tensor in folded_constants(module))


@torch.no_grad()
def test_what_is_returned_is_no_constant() -> None:
    """Whoever gets it may write it."""

    def whole(x: torch.Tensor) -> Any:
        return x + 1, torch.arange(4, device=x.device)

    def view(x: torch.Tensor) -> Any:
        steps = torch.arange(4, device=x.device)
        return x + steps, [steps[1:]]

    for step in (whole, view):
        module = fused(step, [numbers(4)], "steps")
        assert not folded_constants(module)
        first, second = module(numbers(4)), module(numbers(4))
        results = [one[1] if torch.is_tensor(one[1]) else one[1][0] for one in (first, second)]
        assert results[0].data_ptr() != results[1].data_ptr()
        assert_equal(*results)


@torch.no_grad()
def test_what_is_random_or_unfilled_is_no_constant() -> None:
    def random(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(50, device=x.device) + torch.bernoulli(torch.full((50,), 0.5, device=x.device))
        return x * torch.nn.functional.dropout(torch.ones(50, device=x.device), 0.5) + noise

    module = fused(random, [numbers(50)], "steps")
    assert not torch.equal(module(numbers(50)), module(numbers(50)))

    def unfilled(x: torch.Tensor) -> torch.Tensor:
        return x + torch.empty(4, device=x.device) + torch.empty_like(torch.ones(4, device=x.device))

    kept = held(unfilled, numbers(4))
    assert [one.tolist() for one in kept] == [[1.0] * 4]


@torch.no_grad()
def test_tensors_that_may_change_are_no_constants() -> None:
    scale = numbers(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * (scale * 2 + torch.ones(3, device=x.device))

    module = fused(step, [numbers(3)], "steps")
    scale.mul_(5)
    assert_equal(module(numbers(3)), step(numbers(3)))


@torch.no_grad()
def test_only_small_tensors_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fold_constants, "MOST_BYTES", 800)

    def step(x: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(100, device=x.device)
        return x.where(steps[:, None] >= steps[None], 0.0)

    kept = held(step, numbers(100, 100))
    assert {one.numel() for one in kept} <= {1, 100}
    assert step_of(numbers(100, 100))(step)["ge.Tensor"] == 1


@torch.no_grad()
def test_chains_with_constants_are_found() -> None:
    cache = numbers(1, 2, 9, 8), numbers(1, 2, 9, 4), torch.tensor(3, device=DEVICE)

    def step(*given: torch.Tensor) -> Any:
        return kv_append.append_reference(*given)

    found = step_of(*cache, numbers(1, 2, 2, 8), numbers(1, 2, 2, 4))(step)
    assert found["append"] == 1 and not found["arange.default"]


def test_graphs_hold_the_constants_that_they_read(modules: list[Any]) -> None:
    """A CUDA graph knows only where they lie."""
    model = made("Llama")
    expected = decode_whole(model, ids(), 4)
    graph_decoding(model)
    close(decode(model, forward_of(model), static_cache(model, 40), ids(), steps=4), expected)
    module = only(modules)
    (graph,) = forward_of(model)._graphs.values()
    assert graph.constants and {id(one) for one in graph.constants} == {
        id(one) for one in folded_constants(module)
    }
    assert not {node.target for node in module.graph.nodes if "arange" in str(node.target)}


@torch.no_grad()
def test_rows_of_ids_are_one_launch() -> None:
    ids = torch.tensor([[1, 4, 0], [2, 2, 3]], device=DEVICE)
    more = {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": False, "sparse": False}, {}

    def step(weight: torch.Tensor, of: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.nn.functional.embedding(of, weight, **options) * 2

    for options in more:
        found = step_of(numbers(5, 6), ids)(partial(step, **options))
        assert found == {"embed": 1, "mul.Tensor": 1}, options
    # Ids of another dtype, and rows of what is no activation, stay torch's.
    for weight, of in ((numbers(5, 6), ids.int()), (numbers(5, 6).double(), ids)):
        assert step_of(weight, of)(step)["embedding.default"] == 1


@torch.no_grad()
def test_rows_are_read_after_they_are_written() -> None:
    ids = torch.tensor([1, 4, 0], device=DEVICE)

    def step(weight: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        before = torch.nn.functional.embedding(of, weight)
        weight.mul_(2)
        return before + torch.nn.functional.embedding(of, weight)

    assert step_of(numbers(5, 6), ids)(step)["embed"] == 2


def of_product(inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As in transformers 5.12 and 5.17."""
    columns = inv_freq[None, :, None].float().expand(positions.shape[0], -1, 1).to(positions.device)
    return (columns.float() @ positions[:, None, :].float().float()).transpose(1, 2)


def of_numbers(inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """As in transformers 5.23."""
    return positions[..., None].float() * inv_freq


@torch.no_grad()
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 1.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("angles", [of_product, of_numbers])
def test_cosines_and_sines_are_one_launch(
    angles: Step, dtype: torch.dtype, scaling: float, inference: bool
) -> None:
    def step(x: torch.Tensor, inv_freq: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        turns = angles(inv_freq, positions)
        turns = torch.cat((turns, turns), dim=-1)
        cos, sin = turns.cos() * scaling, turns.sin() * scaling
        cos, sin = cos.to(dtype), sin.to(dtype)
        return rope.rotate_reference(x, cos.unsqueeze(1), sin.unsqueeze(1))

    with torch.inference_mode(inference):
        for batch, tokens in ((1, 1), (1, 3), (2, 1), (2, 3)):
            x, inv_freq = numbers(2, 3, tokens, 10).to(dtype), numbers(5).abs()
            positions = torch.arange(batch * tokens, device=DEVICE).view(batch, tokens) * 7
            assert step_of(x, inv_freq, positions)(step) == {
                "cos_sin": 1,
                "part": 2,
                "unsqueeze.default": 2,
                "rotate": 1,
            }


@torch.no_grad()
def test_angles_of_other_shapes_and_dtypes_are_torchs() -> None:
    def step(inv_freq: torch.Tensor, positions: torch.Tensor) -> Any:
        columns = inv_freq[None, :, None].expand(2, -1, 1)
        turns = (columns @ positions[:, None].float()).transpose(1, 2)
        turns = torch.cat((turns, turns), dim=-1)
        return turns.cos() * 1.0, turns.sin() * 1.0

    def flat(inv_freq: torch.Tensor, positions: torch.Tensor) -> Any:
        turns = positions[..., None].float() * inv_freq
        turns = torch.cat((turns, turns), dim=-1)
        return turns.cos() * 1.0, turns.sin() * 1.0

    one = torch.arange(3, device=DEVICE)[None]
    assert step_of(numbers(5), one)(step)["cos.default"] == 1
    for inv_freq, positions in ((numbers(5), one[0]), (numbers(3, 5), one), (numbers(5), one.int())):
        assert step_of(inv_freq, positions)(flat)["cos.default"] == 1
    assert step_of(numbers(5), one)(flat)["cos_sin"] == 1


#: What is launched before the first norm of a Llama, beside what a mask of tokens takes.
START = {"embed": 1, "cos_sin": 1, "add.Tensor": 2, "le.Tensor": 1}
VIEWS = ("unsqueeze.default", "expand.default", "part")
#: A mask that is cast, padded and read at the places of keys; and both masks joined.
MASKED = {
    "_to_copy.default": 1,
    "constant_pad_nd.default": 1,
    "index.Tensor": 1,
    "new_ones.default": 1,
    "bitwise_and.Tensor": 2,
}


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
def test_a_step_starts_with_few_launches(modules: list[Any], masked: bool) -> None:
    model = made("Llama")
    cache, prompt = static_cache(model, 40), ids()
    shown = torch.ones(2, 10, dtype=torch.int64, device=DEVICE)
    shown[0, :2] = 0
    more = {"attention_mask": shown} if masked else {}
    token = ids(tokens=1)
    model(input_ids=prompt, past_key_values=cache, use_cache=True)
    before = [
        tensor.clone() for layer in cache.layers for tensor in vars(layer).values() if is_tensor(tensor)
    ]
    expected = model(input_ids=token, past_key_values=cache, use_cache=True, **more).logits
    after = [tensor for layer in cache.layers for tensor in vars(layer).values() if is_tensor(tensor)]
    for tensor, old in zip(after, before, strict=True):
        tensor.copy_(old)
    graph_decoding(model)
    close(forward_of(model)(input_ids=token, past_key_values=cache, use_cache=True, **more).logits, expected)
    module = only(modules)
    nodes = list(module.graph.nodes)
    (first,) = module.graph.find_nodes(op="call_function", target=rms_norm)
    before_it = [node for node in nodes[: nodes.index(first)] if node.op == "call_function"]
    names = Counter(node.target.__name__ for node in before_it)
    for view in VIEWS:
        del names[view]
    assert names == (START | MASKED if masked else START)

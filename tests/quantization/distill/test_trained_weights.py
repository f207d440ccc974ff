"""Trained weights: gradients of experts, by number and of all at once, are those of an ordinary parameter."""

import pytest
import torch
from torch import nn

from quantkit.model.experts import ExpertsSpec
from quantkit.model.names import ExpertPart
from quantkit.quantization.distill.trained_weights import ExpertStack, Place, TrainedWeights


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: torch.Tensor, *, at_once: bool) -> torch.Tensor:
        if at_once:
            return torch.bmm(x.expand(4, -1, -1), self.down_proj.transpose(1, 2)).sum(0)
        number = torch.tensor([0, 2])
        return x @ self.down_proj[number[0]].T + 2 * x @ self.down_proj[number[1]].T + x @ self.down_proj[0].T


@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_are_those_of_a_parameter(at_once: bool) -> None:
    module, x = Mixture(), torch.randn(6, 5)
    original = module.down_proj
    (2 * module(x, at_once=at_once).square().sum()).backward()
    places = {
        f"{expert}": (Place("down_proj", ExpertPart("down_proj", expert, 0, ExpertsSpec())),)
        for expert in range(4)
    }
    weights = TrainedWeights({"down_proj": original.detach().clone()}, places)
    weights.put_into(module)
    assert module.down_proj.shape == original.shape and isinstance(module.down_proj, ExpertStack)
    for _ in range(2):
        weights.collect()
        assert weights.unreached() == []
        for _ in range(2):
            module(x, at_once=at_once).square().sum().backward()
        for expert in range(4):
            found = weights.gradient(f"{expert}")
            assert original.grad is not None
            torch.testing.assert_close(found, original.grad[expert])
            assert at_once or expert in (0, 2) or not found.any()
        weights.let_go("down_proj")
        assert weights.unreached() == list(places) and not weights.gradient("0").any()
    before = module(x, at_once=at_once)
    weights.write("2", torch.zeros(3, 5))
    assert not module.down_proj[2].any() and not torch.equal(module(x, at_once=at_once), before)


def test_a_stack_joins_the_rows_of_its_places() -> None:
    tensors = {name: torch.zeros(rows, 4) for name, rows in {"a": 2, "b": 1, "c": 3}.items()}
    weights = TrainedWeights(tensors, {"a": tuple(map(Place, tensors))})
    values = torch.arange(24.0).view(6, 4)
    weights.write("a", values)
    assert torch.equal(torch.cat(list(weights.leaves.values())), values)
    assert weights.unreached() == ["a"] and not weights.gradient("a").any()
    (weights.leaves["a"].sum() + 2 * weights.leaves["c"].sum()).backward()
    assert not weights.unreached()
    assert weights.gradient("a")[:, 0].tolist() == [1, 1, 0, 2, 2, 2]
    weights.let_go("c")
    assert weights.gradient("a")[:, 3].tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_one_bit(dtype: torch.dtype) -> None:
    weights = TrainedWeights({"a": torch.ones(3, 4, dtype=dtype), "b": torch.zeros(5).to(dtype)}, {})
    before = weights.checksum()
    assert before == weights.checksum() == 12 * {2: 0x3F80, 4: 0x3F800000}[dtype.itemsize]
    with torch.no_grad():
        weights.leaves["a"][1, 2] += torch.finfo(dtype).eps
    assert weights.checksum() == before + 1


def test_other_operations_see_all_experts() -> None:
    stack = ExpertStack.of(torch.randn(3, 2, 4).requires_grad_())
    assert torch.equal(stack[torch.tensor([0, 2])], stack.whole[[0, 2]])
    assert torch.equal(stack[:, 0], stack.whole[:, 0])
    assert torch.equal(stack[torch.tensor(True)], stack.whole[torch.tensor(True)])
    assert stack[-1] is stack.slices[2] and stack[1].data_ptr() == stack.whole[1].data_ptr()
    assert (stack.dtype, stack.device, len(stack)) == (torch.float32, torch.device("cpu"), 3)
    with pytest.raises(IndexError):
        stack[3]

"""Samples that a dense model writes by graphs are those that it writes plainly."""

import pytest

import quantkit.runtime.passes.fused_forward as fused_forward
from quantkit.model.forward.sampling import continued
from quantkit.runtime.transformers.patches import generation

from ...support.compare import assert_equal
from ..graphed import count_recordings, ids, made

#: The interpreter runs one program after the other, one for each head of a token.
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.mark.parametrize("min_p", [0.0, 0.05])
def test_samples_by_graphs_are_those_without(
    monkeypatch: pytest.MonkeyPatch, interpreter: bool, min_p: float
) -> None:
    monkeypatch.setattr(fused_forward, "can_fuse", lambda device: True)
    recorded = count_recordings(monkeypatch)[0]
    model, beginnings = made("Llama", **SMALL), ids(3, 4)
    expected = continued(model, beginnings, 12, 5, min_p)
    generation.apply(model)
    found = [continued(model, beginnings, 12, 5, min_p) for _ in range(2)]
    generation.undo(model)
    assert len(recorded) == 1
    for one in found:
        assert_equal(one, expected)
    assert not generation.is_applied(model)

"""Models are joined only with those of their kind of format that they do not beat."""

import pytest

from quantkit.report.fronts import MIXED, OTHER, front, kind_of


@pytest.mark.parametrize(
    ("described", "kind"),
    [
        ("int4 g128 bfloat16", "integers"),
        ("int4 g128 asym bfloat16 + int8 channel bfloat16", "integers"),
        ("fp6-e2m3 g128 bfloat16", "floats"),
        ("codebook4 g32 e4m3", "code books"),
        ("nf4 g64 bfloat16", "code books"),
        ("int4 g128 bfloat16 + fp8-e4m3 channel bfloat16", MIXED),
        ("quant_method awq", OTHER),
        ("dense", OTHER),
    ],
)
def test_the_kind_of_what_a_checkpoint_stores(described: str, kind: str) -> None:
    assert kind_of(described) == kind


def test_a_front_has_what_no_other_beats_in_both() -> None:
    assert front([(4, 0.04), (8, 0.001), (5, 0.05), (4.25, 0.02), (4.25, 0.03)]) == [
        (4, 0.04),
        (4.25, 0.02),
        (8, 0.001),
    ]
    assert front([(4, 1.0)]) == [(4, 1.0)] and front([]) == []

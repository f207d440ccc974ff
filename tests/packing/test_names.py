"""Names of the stored parts."""

import pytest

from quantkit.packing.names import CONTAINERS, Container, part_name


def test_compressed_tensors_container_uses_its_vocabulary() -> None:
    names = [part_name("m.weight", part, "compressed-tensors") for part in ("packed", "scale", "shape")]
    assert names == ["m.weight_packed", "m.weight_scale", "m.weight_shape"]


def test_own_container_stores_words_under_the_plain_name() -> None:
    assert part_name("m.weight", "packed", "quantkit") == "m.weight"
    assert part_name("m.weight", "zero_point", "quantkit") == "m.weight_zero_point"


@pytest.mark.parametrize("container", CONTAINERS)
def test_parts_of_a_parameter_have_distinct_names(container: Container) -> None:
    parts = ("packed", "scale", "zero_point", "shape")
    assert len({part_name("m.weight", part, container) for part in parts}) == len(parts)

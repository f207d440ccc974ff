"""Names of the stored parts, and the dtypes that their bytes are shown as."""

import pytest
import torch

from quantkit.checkpoint.compressed_tensors import stored_formats
from quantkit.packing.names import CONTAINERS, QUANTKIT, Container, StoredFormat, packed_parameters

from ..support.compare import assert_equal

PACKED, _, FLOAT, _, MXFP4, _ = stored_formats("compressed-tensors")


def test_compressed_tensors_container_uses_its_vocabulary() -> None:
    names = [PACKED.part_name("m.weight", part) for part in ("packed", "scale", "shape")]
    assert names == ["m.weight_packed", "m.weight_scale", "m.weight_shape"]


def test_own_container_stores_words_under_the_plain_name() -> None:
    assert stored_formats("quantkit") == (QUANTKIT,)
    assert QUANTKIT.part_name("m.weight", "packed") == "m.weight"
    assert QUANTKIT.part_name("m.weight", "zero_point") == "m.weight_zero_point"


@pytest.mark.parametrize("container", CONTAINERS)
def test_parts_of_a_parameter_have_distinct_names(container: Container) -> None:
    parts = ("packed", "scale", "zero_point", "global_scale", "shape")
    for stored in stored_formats(container):
        assert len({stored.part_name("m.weight", part) for part in parts}) == len(parts)


def test_the_file_has_the_same_bytes_under_another_dtype() -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (6, 4), dtype=torch.int64).to(torch.int32)
    for stored, width in ((PACKED, 4), (FLOAT, 16), (MXFP4, 16)):
        shown = stored.to_file("packed", words)
        assert shown.shape == (6, width) and shown.dtype == stored.words_dtype
        assert shown.data_ptr() == words.data_ptr()
        back = stored.from_file("packed", shown, torch.int32)
        assert back.data_ptr() == words.data_ptr()
        assert_equal(back, words)
        assert stored.shapes({"packed": (torch.int32, (6, 4))}) == {"packed": (shown.dtype, (6, width))}


def test_words_that_begin_between_words_are_copied() -> None:
    data = torch.arange(41, dtype=torch.uint8)
    apart = data[1:].view(5, 8)
    words = MXFP4.from_file("packed", apart, torch.int32)
    assert words.data_ptr() % 4 == 0
    assert_equal(words.view(torch.uint8), apart)


def test_a_scale_that_was_cast_stays_as_it_is() -> None:
    cast = torch.ones(2, 1, dtype=torch.float16)
    assert FLOAT.from_file("scale", cast, torch.bfloat16) is cast


def test_packed_parameters_are_those_with_all_that_their_format_has() -> None:
    words, fp8 = torch.int32, torch.float8_e4m3fn
    names = {
        "a.weight_packed": words, "a.weight_scale": torch.float16, "a.weight_shape": torch.int64,
        "b.weight": fp8, "b.weight_scale": torch.float16,
        "c.weight_packed": torch.uint8, "c.weight_scale": torch.uint8,
        "d.weight": torch.float16, "d.weight_scale": torch.float16,
        "e.weight_packed": words, "e.weight_scale": torch.float16,
        "f.weight": words, "f.weight_scale": torch.float16, "f.weight_shape": torch.int64,
    }  # fmt: skip
    found = {name: stored.name for name, stored in packed_parameters(names, _all())}
    assert found == {
        "a.weight": "pack-quantized",
        "b.weight": "float-quantized",
        "c.weight": "mxfp4-pack-quantized",
        "f.weight": "quantkit",
    }


def _all() -> tuple[StoredFormat, ...]:
    return tuple(stored for container in CONTAINERS for stored in stored_formats(container))

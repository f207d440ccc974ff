"""What a tensor-parallel rank takes of a stored matrix."""

import pytest
import torch

from quantkit.errors import CheckpointError, UsageError
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.serving.shares import Share

from ...support.compare import assert_equal
from ...tiny.packed import SCHEMES, absmax_pack

ROWS, COLUMNS = 64, 320


def packed_share(packed: PackedTensor, share: Share) -> PackedTensor:
    assert share.local_scheme is not None
    parts = {part: share.take(part, tensor).contiguous() for part, tensor in packed.parts()}
    return PackedTensor.from_parts(parts, share.local_scheme, share.local_shape)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("cut", [(0, 32), (32, 64), (8, 20), (3, 9)])
@pytest.mark.parametrize("axis", ["rows", "columns"])
def test_a_share_dequantizes_to_its_part_of_the_whole_or_is_refused(name, axis, cut):
    packed = absmax_pack(torch.randn(ROWS, COLUMNS), SCHEMES[name])
    whole = packed.dequantize()
    if axis == "rows":
        rows, columns, units = cut, (0, COLUMNS), packed.scheme.row_units()
    else:
        # Cuts of whole groups of 64, and inside of them.
        rows, columns = (0, ROWS), (cut[0] * 4, cut[1] * 4)
        units = packed.scheme.column_units(COLUMNS)
    ends = rows if axis == "rows" else columns
    if any(end % unit for end in ends for unit in units.values() if end != (ROWS, COLUMNS)[axis != "rows"]):
        with pytest.raises(UsageError, match=f"a rank has {axis} {ends[0]} to {ends[1]} of the .* no whole"):
            Share("q_proj", packed.scheme, packed.shape, (rows,), columns)
        return
    share = Share("q_proj", packed.scheme, packed.shape, (rows,), columns)
    assert_equal(packed_share(packed, share).dequantize(), whole[slice(*rows), slice(*columns)])


def test_one_stored_matrix_may_have_rows_of_several():
    packed = absmax_pack(torch.randn(ROWS, COLUMNS), SCHEMES["int4-asym"])
    share = Share("qkv_proj", packed.scheme, packed.shape, ((0, 16), (32, 40)), (0, COLUMNS))
    whole = packed.dequantize()
    assert_equal(packed_share(packed, share).dequantize(), torch.cat([whole[:16], whole[32:40]]))


def test_a_refused_cut_says_what_to_do():
    with pytest.raises(UsageError) as caught:
        Share("mlp.down_proj", scheme("int3"), (64, 1408), ((0, 64),), (0, 704))
    assert str(caught.value) == (
        "a rank has columns 0 to 704 of the 1408 of 'mlp.down_proj', which are no whole groups of 128. Use a "
        "smaller tensor parallel size, or quantize the model with another format, group size or "
        "--activations."
    )


def test_a_part_of_another_shape_or_dtype_is_refused():
    packed = absmax_pack(torch.randn(ROWS, COLUMNS), SCHEMES["int8"])
    share = Share("q_proj", packed.scheme, (ROWS, COLUMNS), ((0, ROWS),), (0, COLUMNS))
    for wrong in (packed.words[1:], packed.words.float()):
        with pytest.raises(
            CheckpointError, match=r"part 'packed' of 'q_proj' is torch.*expected torch.int32"
        ):
            share.take("packed", wrong)
    dense = Share("q_proj", None, (ROWS, COLUMNS), ((0, ROWS),), (0, COLUMNS))
    with pytest.raises(CheckpointError, match=r"expected floats \(64, 320\) for a dense matrix"):
        dense.take("weight", torch.zeros(ROWS, 80))
    with pytest.raises(CheckpointError, match=r"'q_proj' is \[64, 319\] in the file and \[64, 320\]"):
        share.check_shape(torch.tensor([64, 319]))

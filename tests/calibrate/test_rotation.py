"""Rotations: orthogonal, flat, always the same, and fast ones agree with the matrix."""

import pytest
import torch

from quantkit.calibrate.hadamard import Rotation

from ..support.compare import assert_close, assert_equal

#: Sylvester's, and products with Paley's of either kind: 12, 20, 28, 36, 44, 60, 180, 200.
SIZES = (1, 2, 64, 128, 12, 96, 80, 28, 112, 36, 576, 88, 960, 360, 400)


def matrix(rotation: Rotation) -> torch.Tensor:
    return rotation.apply(torch.eye(rotation.size, dtype=torch.float64))


@pytest.mark.parametrize("size", SIZES)
def test_they_are_orthogonal_and_all_entries_are_as_large(size):
    rotation = Rotation.of(size)
    assert rotation is not None
    found = matrix(rotation)
    assert_close(found @ found.T, torch.eye(size, dtype=torch.float64), rtol=1e-5, atol=1e-13)
    assert_close(found.abs(), torch.full_like(found, size**-0.5), rtol=1e-13, atol=1e-8)
    again = Rotation.of(size)
    assert again is not None
    assert_equal(matrix(again), found)


@pytest.mark.parametrize("size", [64, 96, 180])
def test_every_run_is_multiplied_by_the_matrix(size):
    rotation = Rotation.of(size)
    assert rotation is not None
    x = torch.randn(3, 4 * size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    expected = (x.view(3, 4, size) @ matrix(rotation)).view(3, 4 * size)
    assert_close(rotation.apply(x), expected, rtol=1e-5, atol=1e-13)
    assert_close(rotation.apply(x.T.contiguous().T), expected, rtol=1e-5, atol=1e-13)


def test_a_large_feature_is_spread_over_all():
    rotation = Rotation.of(256)
    assert rotation is not None
    x = torch.zeros(256, dtype=torch.float64)
    x[17] = 100
    assert float(rotation.apply(x).abs().max()) == pytest.approx(100 / 16)


@pytest.mark.parametrize("size", [3, 6, 10, 25, 50, 92])
def test_sizes_without_a_known_hadamard_matrix(size):
    assert Rotation.of(size) is None

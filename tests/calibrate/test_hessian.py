"""The Hessian, its factor and the correction for the input error, against the definitions in float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from quantkit.calibrate import hessian
from quantkit.calibrate.hessian import (
    DAMPINGS,
    RUNS,
    TILE,
    DampedHessian,
    Hessian,
    HessianSum,
    Piece,
    RunSum,
    check_finite,
    cholesky_,
    correction_,
    factorize,
    gram,
    input_error,
    largest,
    run_of,
)
from quantkit.calibrate.methods import METHODS
from quantkit.errors import FormatError

from ..support.compare import assert_close, assert_equal
from ..support.live_bytes import LiveBytes


def inputs(tokens: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Correlated features of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, columns, generator=generator) @ torch.randn(
        columns, columns, generator=generator
    )
    return mixed * torch.logspace(-2, 1, columns)[torch.randperm(columns, generator=generator)]


@pytest.mark.parametrize(
    "columns", [1, 5, TILE["cpu"] - 1, TILE["cpu"], TILE["cpu"] + 3, 2 * TILE["cpu"] + 40]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gram_is_the_product_and_symmetric(columns: int, dtype: torch.dtype) -> None:
    x = inputs(77, columns).to(dtype)
    found = gram(x)
    expected = x.double().T @ x.double()
    assert_equal(found, found.T)
    limit = expected.diagonal().sqrt()
    assert ((found.double() - expected).abs() <= 2e-6 * limit[:, None] * limit).all()


def test_the_input_error_is_the_product_with_the_difference() -> None:
    exact, x = inputs(60, 33), inputs(60, 33) + 0.1 * inputs(60, 33, 1)
    expected = (exact.double() - x.double()).T @ x.double()
    assert_close(input_error(exact, x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [1, 8, 9, 61])
def test_cholesky_in_panels_is_that_of_the_library(columns: int) -> None:
    matrix = DampedHessian.of(gram(inputs(400, columns)) / 400, 0.01).columns(slice(None)).double()

    def panels() -> list[torch.Tensor]:
        ends = range(8, columns + 8, 8)
        return [matrix[end - 8 : end, :end].clone() for end in ends]

    found = panels()
    assert cholesky_(found)
    whole = torch.cat([F.pad(panel, (0, columns - panel.shape[1])) for panel in found])
    assert_close(whole, torch.linalg.cholesky(matrix), rtol=1e-12, atol=1e-12)
    matrix[-1, -1] = -1.0
    assert not cholesky_(panels())


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels that are a small part of matrices of 512 columns, as on a GPU."""
    monkeypatch.setattr(hessian, "TILE", {"cpu": 16})
    for name in ("CHOLESKY_COLUMNS", "CORRECTION_ROWS", "INPUT_ERROR_ROWS"):
        monkeypatch.setattr(hessian, name, 16)


@pytest.mark.usefixtures("narrow")
def test_factoring_holds_less_than_two_matrices() -> None:
    """The lower triangle in float64, and what it becomes, beside the Hessian."""
    hessian = gram(inputs(600, 512)) / 600
    with LiveBytes() as live:
        assert factorize(hessian) is not None
    assert hessian.nbytes < live.most < 1.8 * hessian.nbytes


@pytest.mark.usefixtures("narrow")
def test_the_correction_holds_the_lower_triangle() -> None:
    """In float64, beside the Hessian; what it finds is in the memory of the input error."""
    x = inputs(600, 512)
    given = Hessian(gram(x) / 600, 600, input_error(x + 0.1 * inputs(600, 512, 1), x) / 600)
    with LiveBytes() as live:
        assert correction_(given) is given.input_error
    assert 2 * given.matrix.nbytes < live.most < 2.4 * given.matrix.nbytes


@pytest.mark.usefixtures("narrow")
def test_sums_of_pieces_hold_two_halves_and_two_input_errors() -> None:
    """What came before and the run in work; a piece is nowhere as a whole."""
    x, exact = inputs(32, 512), inputs(32, 512, 1)
    with LiveBytes() as live:
        found = RunSum()
        for piece in range(32):
            rows = slice(piece, piece + 1)
            found.add(Piece(run_of(piece, 32), x[rows], exact[rows]))
        whole = found.hessian()
    assert whole.input_error is not None
    assert 3 * whole.input_error.nbytes < live.most < 3.4 * whole.input_error.nbytes


@pytest.mark.parametrize("has_input_error", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 3, 7, 8, 13, 32])
def test_sums_of_parts_are_the_sum_of_all(pieces: int, has_input_error: bool) -> None:
    x, exact = inputs(10 * pieces, 9), inputs(10 * pieces, 9, 1)

    def total(edges: list[int], multiplied: bool = True) -> Hessian:
        """Summed apart between the edges, and then together."""
        found = RunSum()
        for start, stop in itertools.pairwise(edges):
            part = RunSum()
            for at in range(pieces):
                run, rows = run_of(at, pieces), slice(10 * at, 10 * at + 10)
                piece = Piece(run, x[rows], exact[rows] if has_input_error else None, find_largest=True)
                if start <= run < stop:
                    part.add(HessianSum.of(piece) if multiplied else piece)
            for one in part.parts:
                found.add(one)
            assert len(found.parts) <= 2
        return found.hessian()

    runs = min(pieces, RUNS)
    whole = total([0, runs])
    expected = x.double().T @ x.double() / len(x)
    assert_close(whole.matrix.double(), expected, rtol=1e-5, atol=1e-5)
    assert whole.tokens == len(x) and (whole.input_error is not None) == has_input_error
    every = [[0, runs], [0, 1, runs], [0, runs // 2, runs], [0, 0, runs // 3, 2 * runs // 3, runs]]
    for edges, multiplied in itertools.product(every, (False, True)):
        apart = total(edges, multiplied)
        assert_equal(apart.matrix, whole.matrix)
        assert apart.tokens == whole.tokens
        assert apart.largest is not None
        assert_equal(apart.largest, x.abs().amax(0))
        if whole.input_error is not None and apart.input_error is not None:
            assert_equal(apart.input_error, whole.input_error)
            assert_close(whole.input_error, input_error(exact, x) / len(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("columns", [1, 7, 64, 130])
def test_the_factor_rebuilds_the_damped_hessian(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hessian, "CHOLESKY_COLUMNS", 32)
    h = gram(inputs(400, columns)) / 400
    factor = factorize(h)
    assert factor is not None and factor.damping == DAMPINGS[0]
    assert_equal(factor.order.sort().values, torch.arange(columns))
    diagonal = h.diagonal()[factor.order]
    assert (diagonal.diff() <= 0).all()
    # U D U^T with U = 1 + coupling in the order of rounding.
    ordered = DampedHessian.of(h, factor.damping).ordered(factor.order, slice(None)).double()
    whole = h + factor.damping * h.diagonal().mean() * torch.eye(columns)
    assert_equal(ordered.float(), whole[factor.order][:, factor.order])
    unit = torch.eye(columns, dtype=torch.float64) + factor.coupling.double()
    inverse = torch.linalg.inv(unit)
    pivots = inverse @ ordered @ inverse.T
    off = pivots - torch.diag(pivots.diagonal())
    scale = ordered.diagonal().sqrt()
    assert (off.abs() <= 1e-5 * scale[:, None] * scale * columns).all()
    assert_equal(factor.coupling, torch.triu(factor.coupling, 1))


def test_equal_moments_keep_their_order() -> None:
    factor = factorize(torch.eye(9))
    assert factor is not None and factor.order.tolist() == list(range(9))
    assert not factor.coupling.any()


def test_few_tokens_factor_because_of_the_damping() -> None:
    hessian = gram(inputs(3, 50)) / 3
    assert factorize(hessian) is not None


@pytest.mark.fault(54)
def test_what_is_not_positive_definite_is_damped_more_and_then_refused() -> None:
    hessian = torch.tensor([[1.0, 1.06], [1.06, 1.0]])
    factor = factorize(hessian)
    assert factor is not None and factor.damping == 0.16
    assert factorize(torch.tensor([[1.0, 9.0], [9.0, 1.0]])) is None
    assert factorize(torch.zeros(4, 4)) is None


def test_dead_features_couple_with_none() -> None:
    x = inputs(200, 20)
    x[:, [3, 11]] = 0
    factor = factorize(gram(x) / 200)
    assert factor is not None
    dead = [i for i, column in enumerate(factor.order.tolist()) if column in (3, 11)]
    assert dead == [18, 19]
    assert not factor.coupling[dead].any() and not factor.coupling[:, dead].any()


@pytest.mark.parametrize("panel", [24, 7])
def test_the_correction_is_least_squares_towards_the_original_outputs(
    panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hessian, "CHOLESKY_COLUMNS", panel)
    monkeypatch.setattr(hessian, "CORRECTION_ROWS", panel)
    monkeypatch.setattr(hessian, "DAMPINGS", (1e-9,))
    x, weights = inputs(500, 24), torch.randn(6, 24)
    exact = x + 0.2 * inputs(500, 24, 1)
    given = Hessian(gram(x) / 500, 500, input_error(exact, x) / 500)
    step = correction_(given.joined(None, 1.0), strength=1.0)
    assert step is not None
    fitted = torch.linalg.lstsq(x.double(), exact.double() @ weights.double().T).solution.T
    found = weights + weights @ step
    assert (found - fitted).norm() < 0.01 * fitted.norm()
    half = correction_(given)
    assert half is not None
    assert_close(half, step / 2, rtol=1e-4, atol=1e-6)


def test_no_input_error_corrects_nothing() -> None:
    hessian = gram(inputs(100, 8)) / 100
    assert correction_(Hessian(hessian, 100)) is None
    still = correction_(Hessian(hessian, 100, torch.zeros(8, 8)))
    assert still is not None and not still.any()


def test_the_energy_is_the_mean_square_of_the_outputs() -> None:
    x, rows = inputs(300, 16), torch.randn(5, 16)
    found = Hessian(gram(x) / 300, 300).output_energy(rows)
    assert found == pytest.approx(float((x @ rows.T).double().square().sum() / 300), rel=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_are_refused_with_the_layer(value: float) -> None:
    x = torch.zeros(4, 4)
    check_finite(x, "fine")
    x[1, 2] = value
    with pytest.raises(FormatError, match=r"^model.layers.3.mlp.down_proj: .*calibration.*such as mse"):
        check_finite(x, "model.layers.3.mlp.down_proj")


def test_data_free_methods_need_none() -> None:
    assert {name for name, method in METHODS.items() if not method.needs_data} == {"rtn", "mse", "hqq"}


def test_joined_moments_are_those_of_weighed_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    x, f = (torch.randn(60, 7, generator=generator) for _ in range(2))
    own = slice(40, 60)
    every = Hessian(gram(x) / 60, 60, input_error(f, x) / 60, largest(x))
    few = Hessian(gram(x[own]) / 20, 20, input_error(f[own], x[own]) / 20, largest(x[own]))
    weights = torch.full((60,), 15 / 60)
    weights[own] += 1
    found = every.joined(few, 15)
    assert found.tokens == 20 and found.input_error is not None
    assert_close(found.matrix, (x.T * weights) @ x / 35)
    assert_close(found.input_error, ((f - x).T * weights) @ x / 35)
    assert found.largest is not None
    assert_equal(found.largest, x.abs().amax(0))
    alone = every.joined(None, 15)
    assert (
        alone.matrix is every.matrix
        and alone.input_error is not None
        and alone.input_error is not every.input_error
    )
    assert_equal(alone.input_error, every.input_error)
    assert Hessian(every.matrix, 60).joined(Hessian(few.matrix, 20), 15).input_error is None

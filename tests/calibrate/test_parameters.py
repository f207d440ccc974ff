"""What the rows of a tensor share: rank-one factors and code books are what slow loops compute."""

import itertools

import pytest
import torch

from quantkit.calibrate import codebook, methods, parameters
from quantkit.calibrate.codebook import fit_codebook, normal_book
from quantkit.calibrate.methods import METHODS, quantize_rows, quantize_tensor
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.calibrate.rank_one import fit_column_scale
from quantkit.calibrate.scale_search import mse, rtn
from quantkit.packing.formats import FORMATS, CodebookFormat, FittedFormat
from quantkit.packing.schemes import Scheme, scheme

from ..support.compare import assert_close, assert_equal
from .test_methods import gaussian

E4M3 = torch.float8_e4m3fn
F32_COLUMNS = Scheme(FORMATS["binary"], None, scale_dtype=torch.float32, column_scale=True)
BOOK4 = scheme("book4")


def relative_error(weight: torch.Tensor, chosen: Scheme, method: str = "mse") -> float:
    stored = quantize_tensor(weight, chosen, method=method).dequantize().double()
    return float((stored - weight).square().sum() / weight.double().square().sum())


def rank_one(weight: torch.Tensor) -> torch.Tensor:
    """The best rank-one magnitude, by singular values: float64 [N, K]."""
    left, values, right = torch.linalg.svd(weight.double().abs())
    return values[0] * left[:, :1] @ right[:1]


def test_a_rank_one_magnitude_is_stored_as_it_is():
    rows, columns = gaussian(40, 1).abs() + 0.1, gaussian(1, 70, seed=1).abs() + 0.1
    weight = rows * columns * gaussian(40, 70, seed=2).sign()
    assert relative_error(weight, F32_COLUMNS) < 1e-11
    assert relative_error(weight, scheme("binary-rank1")) < 2e-5


def test_the_factors_are_those_of_the_first_singular_vectors():
    weight = gaussian(60, 90) * (gaussian(1, 90, seed=1).abs() + 0.2)
    packed = quantize_tensor(weight, F32_COLUMNS)
    best = rank_one(weight)
    factors = packed.part("column_scale")
    assert factors.mean().item() == pytest.approx(1, abs=1e-5)
    expected = best[0] / best[0].mean()
    assert_close(factors.double(), expected, rtol=2e-4, atol=0)
    squares = float((best - weight.abs()).square().sum() / weight.double().square().sum())
    assert relative_error(weight, F32_COLUMNS) == pytest.approx(squares, rel=1e-5)


def test_row_scales_are_the_least_squares_ones_of_the_true_error():
    weight = gaussian(7, 33) * (gaussian(1, 33, seed=1).abs() + 0.2)
    packed = quantize_tensor(weight, F32_COLUMNS)
    factors = packed.part("column_scale").double()
    expected = (weight.double().abs() * factors).sum(1) / factors.square().sum()
    assert_close(packed.scale[:, 0].double(), expected, rtol=1e-6, atol=0)


def test_columns_of_zeros_have_factor_one():
    weight = gaussian(8, 40)
    weight[:, [0, 7]] = 0
    for chosen in (scheme("binary-rank1"), Scheme(FORMATS["int4"], 16, column_scale=True)):
        factors = quantize_tensor(weight, chosen).part("column_scale")
        assert factors[0] == factors[7] == 1
        assert bool((factors > 0).all())
    assert fit_column_scale(lambda: [torch.zeros(3, 5)], F32_COLUMNS).tolist() == [1.0] * 5


@pytest.mark.parametrize(
    "chosen",
    [
        Scheme(FORMATS["int4"], 32, column_scale=True),
        Scheme(FORMATS["int4"], 32, "integer", column_scale=True),
        Scheme(FORMATS["nf4"], 32, "none", E4M3, True, column_scale=True),
        Scheme(FORMATS["binary"], 32, planes=2, column_scale=True),
        Scheme(FittedFormat("book3", 3), 32, "none", E4M3, True, column_scale=True),
    ],
    ids=str,
)
def test_column_scales_help_every_format_where_columns_differ(chosen):
    weight = gaussian(64, 172) * torch.exp(gaussian(1, 172, seed=1))
    plain = Scheme(
        chosen.format, 32, chosen.zero_point, chosen.scale_dtype, chosen.global_scale, chosen.planes
    )
    assert relative_error(weight, chosen) < 0.9 * relative_error(weight, plain)


@pytest.mark.parametrize("name", ["binary-rank1", "book4", "nvfp4"])
def test_how_a_tensor_is_cut_does_not_change_a_bit(name, monkeypatch):
    weight = gaussian(37, 172)
    whole = quantize_tensor(weight, name)
    monkeypatch.setattr(methods, "CHUNK_WEIGHTS", 5 * 172)
    cut = quantize_tensor(weight, name)
    assert_equal(whole.tensors, cut.tensors)


@pytest.mark.parametrize("name", ["binary-rank1", "book4", "binary-residual"])
def test_quantized_rows_report_the_error_that_dequantizing_shows(name):
    weight = gaussian(20, 172)
    chosen = scheme(name)
    shared = fit_parameters(lambda: [weight], (20, 172), chosen, mse)
    rows = quantize_rows(weight, chosen, METHODS["mse"], shared)
    stored = quantize_tensor(weight, chosen).dequantize().double()
    assert rows.squared_error == pytest.approx(float((stored - weight).square().sum()), rel=1e-5)
    assert rows.squared_norm == pytest.approx(float(weight.double().square().sum()))


def test_plain_schemes_share_nothing_and_are_not_read():
    def chunks() -> list[torch.Tensor]:
        raise AssertionError("read")

    assert fit_parameters(chunks, (4, 64), scheme("int4"), rtn) == TensorParameters()


# Code books


def test_the_book_starts_from_quantiles():
    assert normal_book(16) == pytest.approx(FORMATS["nf4"].values, abs=1e-6)
    for count in (2, 4, 8, 256):
        book = normal_book(count)
        assert len(book) == count and max(map(abs, book)) == 1
        assert all(low < high for low, high in itertools.pairwise(book))


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_a_fitted_book_beats_nf4_and_what_it_started_from(method):
    for weight in (gaussian(64, 512), gaussian(64, 512) ** 3):
        fitted = relative_error(weight, BOOK4, method)
        for book in (normal_book(16), FORMATS["nf4"].values):
            fixed = Scheme(CodebookFormat("fixed", 4, book), 32, "none", E4M3, True)
            assert fitted < relative_error(weight, fixed, method)


def test_a_tensor_of_four_values_has_them_for_a_book():
    values = torch.tensor([-0.75, -0.125, 0.25, 1.0])
    pick = torch.randint(0, 4, (64, 64), generator=torch.Generator().manual_seed(0))
    pick[:, ::32] = 3
    packed = quantize_tensor(values[pick], Scheme(FittedFormat("book2", 2), 32))
    assert_close(packed.part("codebook"), values, rtol=0, atol=1e-3)
    assert_close(packed.dequantize(), values[pick], rtol=0, atol=2e-3)


def test_one_round_is_what_loops_compute():
    chosen = Scheme(FittedFormat("book2", 2), 16, scale_dtype=torch.float32)
    rows, book = gaussian(5, 40), (-1.0, -0.25, 0.25, 1.0)
    _, found = codebook._round(rows, chosen, book, 1.0, rtn)
    sums = [[0.0, 0.0] for _ in book]
    for row in rows.tolist():
        for group in (row[:16], row[16:32], row[32:]):
            scale = max(map(abs, group))
            for weight in group:
                nearest = min(range(4), key=lambda i: abs(weight - scale * book[i]))
                sums[nearest][0] += scale * weight
                sums[nearest][1] += scale * scale
    means = [top / bottom for top, bottom in sums]
    assert found == pytest.approx(means, rel=1e-5)


@pytest.mark.parametrize("weight", [torch.zeros(4, 64), torch.ones(4, 64), torch.tensor([[-0.3]])])
def test_books_of_few_weights_are_books(weight):
    packed = quantize_tensor(weight, "book4")
    book = packed.part("codebook")
    assert bool((book.diff() > 0).all()) and book.abs().max() == 1
    assert_close(packed.dequantize(), weight, rtol=0.08, atol=0)


def test_the_sample_is_whole_rows_at_even_distances(monkeypatch):
    seen = []

    def fit(rows: torch.Tensor, *_: object) -> tuple[float, ...]:
        seen.append(rows)
        return fit_codebook(rows, *_)  # type: ignore[arg-type]

    monkeypatch.setattr(parameters, "fit_codebook", fit)
    monkeypatch.setattr(parameters, "SAMPLE_WEIGHTS", 64 * 10)
    weight = gaussian(37, 64)
    for cut in (1, 5, 37):
        fit_parameters(lambda cut=cut: weight.split(cut), (37, 64), BOOK4, rtn)
        assert_equal(seen.pop(), weight[::4])


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_a_bit(threads):
    weight = gaussian(300, 512)
    before = torch.get_num_threads()
    expected = quantize_tensor(weight, "book4", method="rtn")
    torch.set_num_threads(threads)
    try:
        found = quantize_tensor(weight, "book4", method="rtn")
    finally:
        torch.set_num_threads(before)
    assert_equal(expected.tensors, found.tensors)

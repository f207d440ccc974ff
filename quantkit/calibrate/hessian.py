"""Compute the Hessian of a linear's inputs, the only statistic of most methods with data.

For inputs X [T, K] of a linear, H = X^T X / T. With stored weights Q, the squared error of the outputs is
tr((W - Q) H (W - Q)^T). Linears with the same input, such as q, k and v, share one H. `HessianSum`
and `RunSum` sum it. `factorize` damps it by the smallest of `DAMPINGS` that works, for GPTQ in `gptq.py`.

Inputs come from the already quantized part of the model, so they differ from the original model's inputs F.
The input error is D = (F - X)^T X / T. On inputs X, the weights W + W D H^-1 come closest to W F (QEP, arXiv
2504.09629).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quantkit.errors import FormatError

#: Columns of H computed at a time, by device. H is symmetric: tiles below the diagonal are mirrored.
TILE = {"cpu": 128, "cuda": 2048}
#: Rows of D computed at a time: a GPU holds this many rows of a summand in memory.
INPUT_ERROR_ROWS = 2048
#: Columns of H factored at a time.
CHOLESKY_COLUMNS = 4096
#: Rows of D H^-1 computed at a time, in float64.
CORRECTION_ROWS = 1024
#: Runs in which pieces of inputs are summed: at most this many ranks can share the work.
RUNS = 8
#: Damping added to the diagonal of H, relative to its mean; if factorizing fails, the next is tried.
DAMPINGS = (0.01, 0.04, 0.16, 0.64)
#: Fraction of the input error that is corrected. Correcting all of it overfits the calibration data.
CORRECTION = 0.5


@dataclass(frozen=True, eq=False)
class Hessian:
    """H [K, K] and, if requested, D [K, K], float32, means over `tokens`.

    `largest` is the largest magnitude of each input feature, float32 [K], if requested.
    """

    matrix: torch.Tensor
    tokens: int
    input_error: torch.Tensor | None = None
    largest: torch.Tensor | None = None

    @property
    def importance(self) -> torch.Tensor:
        """Return the mean square of each input feature, float32 [K]."""
        return self.matrix.diagonal()

    def joined(self, other: "Hessian | None", weight: float) -> "Hessian":
        """Combine this Hessian, weighted as `weight` tokens, with another Hessian of the same fields.

        The input error is copied.
        """
        if other is None:
            return replace(self, input_error=None if self.input_error is None else self.input_error.clone())
        share = weight / (weight + other.tokens)
        shift = None
        if self.input_error is not None:
            assert other.input_error is not None
            shift = torch.lerp(other.input_error, self.input_error, share)
        most = None
        if self.largest is not None:
            assert other.largest is not None
            most = torch.maximum(other.largest, self.largest)
        return Hessian(torch.lerp(other.matrix, self.matrix, share), other.tokens, shift, most)

    def output_energy(self, rows: torch.Tensor) -> float:
        """Return the mean squared output of `rows` (float32 [n, K]), summed over rows: tr(rows H rows^T)."""
        return self.output_energies(rows[None])[0]

    def output_energies(self, parts: torch.Tensor) -> list[float]:
        """Return `output_energy` of each of C `parts` (float32 [C, n, K])."""
        rows = parts.flatten(0, 1)
        products = (rows @ self.matrix).double().mul_(rows).view(parts.shape)
        return torch.stack([part.sum() for part in products]).tolist()


def run_of(piece: int, count: int) -> int:
    """Return the run of micro-batch `piece` of `count`, from 0: inputs whose Hessian is summed separately."""
    return piece * min(RUNS, count) // count


@dataclass(frozen=True, eq=False)
class Piece:
    """Inputs of a linear for some tokens of the calibration data.

    run           number of its run, the inputs whose Hessian is summed separately (`run_of`)
    inputs        X [T, K], in the already quantized model
    exact         F [T, K], in the original model; None if no input error is needed
    find_largest  True if the largest magnitude of each feature is needed
    """

    run: int
    inputs: torch.Tensor
    exact: torch.Tensor | None = None
    find_largest: bool = False

    @property
    def first(self) -> int:
        return self.run

    @property
    def tokens(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, eq=False)
class HessianSum:
    """Sums over `tokens` tokens of inputs: some of one run, or all of the runs `first` to `last`; float32.

    columns      K, the input features
    strips       X^T X [K, K], symmetric: its strips from `_strips`, one after the other
    largest      [K], largest magnitude of each input feature; None if not requested
    input_error  (F - X)^T X [K, K]; None if not requested
    """

    first: int
    last: int
    tokens: int
    columns: int
    strips: torch.Tensor
    largest: torch.Tensor | None = None
    input_error: torch.Tensor | None = None

    @classmethod
    def of(cls, piece: Piece) -> "HessianSum":
        """Start the sum with the inputs `piece`."""
        columns, device = piece.inputs.shape[1], piece.inputs.device
        return cls(
            piece.run,
            piece.run,
            0,
            columns,
            torch.zeros(strip_entries(columns, device), device=device),
            torch.zeros(columns, device=device) if piece.find_largest else None,
            None if piece.exact is None else torch.zeros(columns, columns, device=device),
        ).plus(piece)

    def plus(self, following: "HessianSum | Piece") -> "HessianSum":
        """Add the inputs that follow, in place; use the returned sum instead of this one.

        Products of its inputs are added some rows at a time, so they are never in memory as a whole.
        """
        most, last = self.largest, following.first
        if isinstance(following, Piece):
            wide = _widened(following.inputs)
            _add_gram(self.strips, wide)
            if self.input_error is not None:
                assert following.exact is not None
                _add_input_error(self.input_error, following.exact, wide)
            if most is not None:
                most = torch.maximum(most, largest(following.inputs))
        else:
            last = following.last
            self.strips.add_(following.strips)
            if self.input_error is not None:
                assert following.input_error is not None
                self.input_error.add_(following.input_error)
            if most is not None:
                assert following.largest is not None
                most = torch.maximum(most, following.largest)
        return replace(self, last=last, tokens=self.tokens + following.tokens, largest=most)

    def hessian(self) -> Hessian:
        """Divide the sums by the number of tokens, in place, and return the means."""
        shift = None if self.input_error is None else self.input_error.div_(self.tokens)
        matrix = _mirrored(self.strips.div_(self.tokens), self.columns)
        return Hessian(matrix, self.tokens, shift, self.largest)


class RunSum:
    """Hessian of inputs added in order, some tokens (`Piece`) at a time: each run is summed by itself.

    Different ranks can sum runs: adding their `parts` in order gives the same bits as one process. Takes
    the memory of two sums.
    """

    def __init__(self) -> None:
        self.parts: list[HessianSum] = []

    def add(self, part: HessianSum | Piece) -> None:
        """Add the next inputs, or a sum of some."""
        if self.parts and self.parts[-1].last == part.first:
            self.parts.append(self.parts.pop().plus(part))
            return
        if len(self.parts) == 2 and self.parts[0].first == 0:
            self.parts = [self.parts[0].plus(self.parts[1])]
        self.parts.append(HessianSum.of(part) if isinstance(part, Piece) else part)

    def hessian(self) -> Hessian:
        """Return the Hessian of all inputs added, at least one `Piece`; nothing can be added later."""
        total = self.parts.pop(0)
        while self.parts:
            total = total.plus(self.parts.pop(0))
        return total.hessian()


def gram(inputs: torch.Tensor) -> torch.Tensor:
    """Return X^T X of inputs [T, K], float32, exactly symmetric. Products of 16-bit inputs are exact."""
    columns = inputs.shape[1]
    strips = torch.zeros(strip_entries(columns, inputs.device), device=inputs.device)
    _add_gram(strips, _widened(inputs))
    return _mirrored(strips, columns)


def _add_gram(strips: torch.Tensor, wide: torch.Tensor) -> None:
    """Add X^T X of widened inputs [T, K] to `strips`, float32."""
    for at, strip in _strips(strips, wide.shape[1]):
        strip.add_(_product(wide[:, at : at + len(strip)], wide[:, at:]))


def _strips(strips: torch.Tensor, columns: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield strips of a symmetric matrix float32 [K, K]: n rows from the diagonal tile on, [n, K - at].

    Yields (first row `at`, strip); `strips` is their concatenation.
    """
    most, start = TILE[strips.device.type], 0
    for at in range(0, columns, most):
        shape = (min(most, columns - at), columns - at)
        yield at, strips[start : start + shape[0] * shape[1]].view(shape)
        start += shape[0] * shape[1]


def strip_entries(columns: int, device: torch.device) -> int:
    """Return the number of entries of all strips of a matrix [K, K]."""
    most = TILE[device.type]
    return sum(min(most, columns - at) * (columns - at) for at in range(0, columns, most))


def _mirrored(strips: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the whole symmetric matrix [K, K] of `strips`, float32."""
    out = torch.empty(columns, columns, device=strips.device)
    for at, strip in _strips(strips, columns):
        stop = at + len(strip)
        out[at:stop, stop:] = strip[:, stop - at :]
        out[stop:, at:stop] = strip[:, stop - at :].T
        # A tile times its transpose may differ from its mirror image in the last bit.
        tile = strip[:, : stop - at]
        out[at:stop, at:stop] = torch.triu(tile) + torch.triu(tile, 1).T
    return out


def _widened(inputs: torch.Tensor) -> torch.Tensor:
    """Convert inputs [T, K] to the dtype in which products are taken: float32.

    Inputs of 16 bits on a GPU stay, as it sums their products in float32.
    """
    return inputs if inputs.is_cuda and inputs.itemsize == 2 else inputs.to(torch.float32)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a^T b of [T, n] and [T, m], float32."""
    return a.T @ b if a.dtype == torch.float32 else torch.mm(a.T, b, out_dtype=torch.float32)


def largest(inputs: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each feature of inputs [T, K], float32 [K]."""
    return torch.maximum(inputs.amax(0), -inputs.amin(0)).to(torch.float32)


def input_error(exact: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return (F - X)^T X, float32 [K, K], of the original's inputs F and the quantized model's X, [T, K]."""
    columns = inputs.shape[1]
    total = torch.zeros(columns, columns, device=inputs.device)
    _add_input_error(total, exact, _widened(inputs))
    return total


def _add_input_error(total: torch.Tensor, exact: torch.Tensor, wide: torch.Tensor) -> None:
    """Add `input_error` of widened inputs [T, K] to `total`, float32 [K, K]."""
    for at in range(0, len(total), INPUT_ERROR_ROWS):
        columns = slice(at, at + INPUT_ERROR_ROWS)
        total[columns].add_(_product(_widened(exact[:, columns]) - wide[:, columns], wide))


@dataclass(frozen=True, eq=False)
class CholeskyFactor:
    """Cholesky factor of damped H: the order in which columns are rounded, and how their errors couple.

    order     int64 [K], columns by falling mean square of their feature
    coupling  float32 [K, K], strictly upper triangular, rows and columns in `order`: column j is rounded at
              its weights plus E C[:, j], with C the coupling and E [n, K] the errors W - Q in that order
    damping   number added to the diagonal of H, over the diagonal's mean
    """

    order: torch.Tensor
    coupling: torch.Tensor
    damping: float


def factorize(hessian: torch.Tensor) -> CholeskyFactor | None:
    """Factorize H (float32 [K, K]) with the smallest of `DAMPINGS` that works; None if none does.

    H = L D L^T from the last column to round to the first, in float64; only the lower triangle is in memory.
    A feature that is always zero couples with none, and is rounded to nearest.
    """
    # A stable sort keeps equal diagonal entries in the same order everywhere.
    order = torch.argsort(hessian.diagonal(), descending=True, stable=True)
    backwards = order.flip(0)
    for damping in DAMPINGS:
        panels = _panels(hessian, backwards, damping)
        if cholesky_(panels):
            return CholeskyFactor(order, _coupling(panels), damping)
    return None


def _panels(hessian: torch.Tensor, order: torch.Tensor, damping: float) -> list[torch.Tensor]:
    """Return H [K, K], both dimensions in `order` (int64 [K]), as float64 panels for `cholesky_`.

    `damping` times the mean of the diagonal is added to the diagonal.
    """
    diagonal = hessian.diagonal()[order].double()
    added = damping * diagonal.mean()
    panels = []
    for at in range(0, len(order), CHOLESKY_COLUMNS):
        stop = min(at + CHOLESKY_COLUMNS, len(order))
        panel = hessian.index_select(0, order[at:stop]).index_select(1, order[:stop]).double()
        panel.diagonal(at).add_(added)
        panels.append(panel)
    return panels


def cholesky_(panels: Sequence[torch.Tensor]) -> bool:
    """Replace a symmetric matrix by its lower Cholesky factor, in place.

    `panels` are slices of rows of its lower triangle, each up to its last column on the diagonal: [n, at +
    n]. Entries above the diagonal become zero. Returns False, without a valid factor, if the matrix is not
    finite or not positive definite.
    """
    for number, panel in enumerate(panels):
        at = panel.shape[1] - len(panel)
        corner = panel[:, at:]
        lower, info = torch.linalg.cholesky_ex(corner)
        if int(info) != 0:
            return False
        corner.copy_(lower)
        for later, rows in enumerate(panels[number + 1 :], number + 1):
            solved = torch.linalg.solve_triangular(lower, rows[:, at : panel.shape[1]].T, upper=False).T
            rows[:, at : panel.shape[1]] = solved
            for other in panels[number + 1 : later + 1]:
                start = other.shape[1] - len(other)
                rows[:, start : other.shape[1]].sub_(solved @ other[:, at : panel.shape[1]].T)
    # A sum detects infinities and NaN without extra memory.
    return all(bool(torch.isfinite(panel.sum())) for panel in panels)


def _coupling(panels: list[torch.Tensor]) -> torch.Tensor:
    """Return `CholeskyFactor.coupling`, float32 [K, K], from the factor of H in `panels`; consumes them."""
    columns = panels[-1].shape[1]
    diagonal = torch.cat([panel.diagonal(panel.shape[1] - len(panel)) for panel in panels])
    units = []
    # Halve all panels in memory before the whole matrix is allocated.
    while panels:
        units.append((panels[-1].div_(diagonal[: panels[-1].shape[1]])).float())
        panels.pop()
    found = torch.zeros(columns, columns, device=diagonal.device)
    for unit in units:
        at = columns - unit.shape[1]
        found[at : at + len(unit), at:] = unit.flip(0, 1)
    return found.triu_(1)


@dataclass(frozen=True, eq=False)
class DampedHessian:
    """H [K, K] float32 with `added` on its diagonal; slices are computed on request."""

    matrix: torch.Tensor
    added: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, damping: float) -> "DampedHessian":
        """Return H (`matrix`, float32 [K, K]) with `damping` times the mean of its diagonal added."""
        return cls(matrix, damping * matrix.diagonal().mean())

    def columns(self, span: slice) -> torch.Tensor:
        """Return columns `span`, float32 [K, n]."""
        found = self.matrix[:, span].clone()
        found[span].diagonal().add_(self.added)
        return found

    def ordered(self, order: torch.Tensor, span: slice) -> torch.Tensor:
        """Return rows `span` with both dimensions in `order` (int64 [K]): float32 [n, K]."""
        found = self.matrix.index_select(0, order[span]).index_select(1, order)
        found[:, span].diagonal().add_(self.added)
        return found


def correction_(hessian: Hessian, strength: float = CORRECTION) -> torch.Tensor | None:
    """Return P float32 [K, K] such that W + W P corrects a part `strength` of the input error.

    P overwrites `hessian.input_error` [K, K]. None without an input error, or if H is singular with all of
    `DAMPINGS`.
    """
    total = hessian.input_error
    if total is None:
        return None
    natural = torch.arange(len(total), device=total.device)
    for damping in DAMPINGS:
        panels = _panels(hessian.matrix, natural, damping)
        if cholesky_(panels):
            break
    else:
        return None
    for at in range(0, len(total), CORRECTION_ROWS):
        rows = total[at : at + CORRECTION_ROWS]
        # D H^-1 is the transpose of H^-1 D^T = L^-T L^-1 D^T.
        solved = rows.double().T.contiguous()
        _divide_(solved, panels)
        rows.copy_(solved.T.mul_(strength))
    return total


def _divide_(columns: torch.Tensor, panels: Sequence[torch.Tensor]) -> None:
    """Replace columns, float64 [K, n], by L^-T L^-1 times them; L is lower triangular, in panels."""
    for panel in panels:
        at, stop = panel.shape[1] - len(panel), panel.shape[1]
        rows = columns[at:stop]
        if at:
            rows.sub_(panel[:, :at] @ columns[:at])
        rows.copy_(torch.linalg.solve_triangular(panel[:, at:], rows, upper=False))
    for panel in reversed(panels):
        at, stop = panel.shape[1] - len(panel), panel.shape[1]
        rows = columns[at:stop]
        rows.copy_(torch.linalg.solve_triangular(panel[:, at:].T, rows, upper=True))
        if at:
            columns[:at].sub_(panel[:, :at].T @ rows)


def check_finite(inputs: torch.Tensor, name: str) -> None:
    """Raise `FormatError` if an input of the linear `name`, [..., K], is NaN or infinite."""
    # The sum takes a tenth of the time; only if it is not finite, check if it merely overflowed.
    if not bool(torch.isfinite(inputs.sum())) and not bool(torch.isfinite(inputs).all()):
        nan, infinite = int(inputs.isnan().sum()), int(inputs.isinf().sum())
        raise FormatError(
            f"{name}: {nan} NaN and {infinite} infinite inputs (of {inputs.numel()}, {inputs.dtype}) during "
            "calibration. The weights before it are damaged, or activations overflow the dtype: run on the "
            "CPU, which computes in float32, check the checkpoint, or take a method without data, such as "
            "mse."
        )

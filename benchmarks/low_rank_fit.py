"""Fit a low-rank binary matrix: W ~ diag(a) U diag(c) V^T diag(b), with signs U [N, r] and V [K, r].

Three steps, after NanoQuant (arXiv 2602.06694):

1. ADMM from the truncated SVD. Factors X and Y of W ~ X Y^T solve least squares in turn, drawn ever more to
   signs times magnitudes of rank one.
2. Coordinate descent: every sign to its best value given all others, then scales to theirs.
3. Adam on latent numbers whose signs are U and V, gradients straight through; then step 2 again.
"""

from dataclasses import dataclass, replace

import torch

#: Bits of a stored scale.
SCALE_BITS = 16
#: Weight of the pull to signs, relative to the mean diagonal of the normal equations: first and last.
PULL = (0.03, 1.0)
#: Columns whose signs are chosen before sums of all columns are made up to date.
BLOCK = 32
#: Coordinate descent ends with a round that lowers the error by less than this part.
TOLERANCE = 1e-3


def bits_of(n: int, k: int, rank: int) -> float:
    """Return the bits per weight: signs and the scales a, b and c."""
    return (rank * (n + k) + SCALE_BITS * (n + k + rank)) / (n * k)


def rank_for(n: int, k: int, bits: float) -> int:
    """Return the largest rank of at most `bits` per weight."""
    return int((bits * n * k - SCALE_BITS * (n + k)) / (n + k + SCALE_BITS))


@dataclass(frozen=True)
class LowRank:
    """Signs u [N, r] and v [K, r], scales a [N], c [r] and b [K], all float32."""

    u: torch.Tensor
    v: torch.Tensor
    a: torch.Tensor
    c: torch.Tensor
    b: torch.Tensor

    def matrix(self) -> torch.Tensor:
        return self.u * self.a[:, None] * self.c @ (self.v * self.b[:, None]).T

    def transposed(self) -> "LowRank":
        return LowRank(self.v, self.u, self.b, self.c, self.a)

    def error(self, weight: torch.Tensor) -> float:
        """Return the squared error over the sum of squares."""
        return float((weight - self.matrix()).square().sum() / weight.square().sum())


def fit(
    weight: torch.Tensor,
    rank: int,
    importance: torch.Tensor | None = None,
    *,
    iterations: int = 120,
    rounds: int = 15,
    steps: int = 0,
) -> LowRank:
    """Fit a weight [N, K]; `importance` [K] weights the squared errors of columns.

    `iterations` are of ADMM, `rounds` of coordinate descent, `steps` of Adam.
    """
    root = torch.ones(weight.shape[1], device=weight.device)
    if importance is not None:
        root = column_weights(importance)
    target = weight.float() * root
    found = refine(target, scaled(target, admm(target, rank, iterations)), rounds)
    if steps:
        found = refine(target, straight_through(target, found, steps), rounds)
    found = replace(found, b=found.b / root)
    # As they are stored.
    a, c, b = (part.bfloat16().float() for part in (found.a, found.c, found.b))
    return replace(found, a=a, c=c, b=b)


def column_weights(importance: torch.Tensor) -> torch.Tensor:
    """Return the weights [K] of errors of columns whose squared errors count by `importance` [K]."""
    return (importance / importance.mean() + 0.01).sqrt()


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 0, -1.0, 1.0)


def rank_one(magnitudes: torch.Tensor, rounds: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors whose outer product is near a positive matrix."""
    rows = magnitudes.mean(1)
    for _ in range(rounds):
        columns = magnitudes.T @ rows / rows.square().sum()
        rows = magnitudes @ columns / columns.square().sum()
    return rows, columns


def admm(weight: torch.Tensor, rank: int, iterations: int) -> LowRank:
    """Return signs and scales near the best factors of real numbers."""
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    kept = min(rank, len(values))
    # Turned by chance: all columns have about the same magnitude, also of more columns than singular values.
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(rank, rank, generator=generator))[0][:kept].to(weight.device)
    x, y = (part[:, :kept] * values[:kept].sqrt() @ turn for part in (left, right.T))
    of_x, of_y = projected(x), projected(y)
    slack_x, slack_y = torch.zeros_like(x), torch.zeros_like(y)
    for i in range(iterations):
        pull = PULL[0] * (PULL[1] / PULL[0]) ** (i / max(1, iterations - 1))
        x = solved(weight, y, of_x - slack_x, pull)
        of_x = projected(x + slack_x)
        slack_x += x - of_x
        y = solved(weight.T, x, of_y - slack_y, pull)
        of_y = projected(y + slack_y)
        slack_y += y - of_y
    (a, c), (b, d) = rank_one((x + slack_x).abs()), rank_one((y + slack_y).abs())
    return LowRank(signs(of_x), signs(of_y), a, c * d, b)


def projected(x: torch.Tensor) -> torch.Tensor:
    """Return signs times magnitudes of rank one."""
    rows, columns = rank_one(x.abs())
    return signs(x) * rows[:, None] * columns


def solved(weight: torch.Tensor, y: torch.Tensor, near: torch.Tensor, pull: float) -> torch.Tensor:
    """Return the x of least ||weight - x y^T||^2 + pull * ||x - near||^2, pull relative."""
    gram = y.T @ y
    ridge = pull * gram.diagonal().mean()
    factor = torch.linalg.cholesky(gram + ridge * torch.eye(len(gram), device=gram.device))
    return torch.cholesky_solve((weight @ y + ridge * near).T, factor).T


def scaled(weight: torch.Tensor, found: LowRank, rounds: int = 3) -> LowRank:
    """Return the same signs with scales of least squares: c, a and b in turn."""
    u, v, a, b = found.u, found.v, found.a, found.b
    for _ in range(rounds):
        left, right = u * a[:, None], v * b[:, None]
        gram = (left.T @ left) * (right.T @ right)
        ridge = 1e-5 * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device)
        c = torch.linalg.solve(gram + ridge, (left.T @ weight * right.T).sum(1))
        rows = u * c @ right.T
        a = (rows * weight).sum(1) / rows.square().sum(1).clamp(min=1e-20)
        columns = u * a[:, None] * c @ v.T
        b = (columns * weight).sum(0) / columns.square().sum(0).clamp(min=1e-20)
    return LowRank(u, v, a, c, b)


def descended(weight: torch.Tensor, found: LowRank) -> torch.Tensor:
    """Return u with each sign of least error given those before and after it, column by column."""
    u = found.u.clone()
    right = found.v * found.b[:, None] * found.c
    gram = right.T @ right
    wanted = weight @ right / torch.where(found.a == 0, 1.0, found.a)[:, None]
    for start in range(0, u.shape[1], BLOCK):
        columns = slice(start, start + BLOCK)
        rest = wanted[:, columns] - u @ gram[:, columns]
        for j in range(start, min(start + BLOCK, u.shape[1])):
            new = signs(rest[:, j - start] + gram[j, j] * u[:, j])
            rest -= (new - u[:, j])[:, None] * gram[j, columns]
            u[:, j] = new
    return u


def refine(weight: torch.Tensor, found: LowRank, rounds: int) -> LowRank:
    """Return signs and scales after rounds of coordinate descent, until the error hardly falls."""
    error = found.error(weight)
    for _ in range(rounds):
        found = replace(found, u=descended(weight, found))
        found = replace(found, v=descended(weight.T, found.transposed()))
        found = scaled(weight, found, 1)
        before, error = error, found.error(weight)
        if before - error < TOLERANCE * before:
            break
    return found


def straight_through(weight: torch.Tensor, found: LowRank, steps: int) -> LowRank:
    """Return what Adam makes of latent numbers that start near zero, with the signs found."""
    latents = [(0.1 * part).requires_grad_() for part in (found.u, found.v)]
    scales = [part.clone().requires_grad_() for part in (found.a, found.c, found.b)]
    rates = [{"params": latents, "lr": 0.01}]
    rates += [{"params": [part], "lr": 1e-3 * float(part.detach().abs().mean())} for part in scales]
    adam = torch.optim.Adam(rates, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        u, v = (part + (signs(part) - part).detach() for part in latents)
        loss = (weight - LowRank(u, v, *scales).matrix()).square().sum() / weight.square().sum()
        adam.zero_grad()
        loss.backward()
        adam.step()
        schedule.step()
    u, v = (signs(part.detach()) for part in latents)
    return scaled(weight, LowRank(u, v, *(part.detach() for part in scales)))

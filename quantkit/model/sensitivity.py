"""Sensitivity: how far a model's predictions move when some of its linears are stored in some scheme.

Where stored weights W - E take the place of W, the outputs of a linear move by E x. To second order the KL
divergence of the model's predictions then is half the mean square of g E x, for g the gradient of the log
probability of tokens that the model itself draws (the Fisher information; Martens, "New insights and
perspectives on the natural gradient method", arXiv 1412.1193). With what is taken for independent here (one
output of another, one token of another, and the size of a token's gradient of how it is spread over outputs)
it is, in nats per token,

    1/2 sum_n f_n (E H E^T)_nn,    f_n = mean of g_n^2,    H = mean of |g|^2 x x^T over the mean of |g|^2.

So one pass forward and one backward serve every scheme of every linear. E is what the method makes of some
rows of each weight. Divergences of several linears are taken to add up; docs/accuracy.md says how well they
do.

The blocks are in memory one at a time, as in calibration, with the hidden states before each of them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from quantkit.calibrate.calibrated import Inputs, quantize_calibrated_rows
from quantkit.calibrate.methods import Method, packed_rows, quantize_tensor
from quantkit.calibrate.moments import Moments, check_finite, gram
from quantkit.calibrate.parameters import fit_parameters
from quantkit.calibrate.samples import micro_batch
from quantkit.errors import FormatError
from quantkit.model.blocks import Block, Decoder, Home, stages_of
from quantkit.packing.schemes import Scheme

#: Tokens to measure on, whole samples. Their hidden states before every block are in memory.
TOKENS = 8192
#: Samples at a time, and logits at a time.
BATCH = 4
LOGITS = 1 << 24
#: Rows of a weight that are quantized to see what a scheme costs it. Methods with data take far longer.
ROWS = 256
CALIBRATED_ROWS = 64
#: Code books are fitted to one of so many of them.
FITTED = 8

#: Steps done, steps in all, what is at work.
Report = Callable[[int, int, str], None]


def measure(
    decoder: Decoder,
    schemes: Mapping[str, Sequence[Scheme]],
    method: Method,
    tokens: torch.Tensor,
    lanes: int,
    report: Report | None = None,
) -> dict[str, tuple[float, ...]]:
    """What each of its `schemes` costs each linear, by the linear's name: nats per token of KL divergence of
    the whole model, all other linears dense.

    `tokens` are int64 [samples, length], `lanes` the number of workers, of one thread each, on which the
    result does not depend. `CheckpointError` for a model that does not come in blocks or whose linears do not
    run once, `FormatError` for weights or inputs that are not finite.
    """
    workers = ThreadPoolExecutor(lanes, "sensitivity", initializer=torch.set_num_threads, initargs=(1,))
    threads = torch.get_num_threads()
    try:
        return _Measurement(decoder, method, workers, lanes, report).run(schemes, tokens)
    finally:
        workers.shutdown(cancel_futures=True)
        # A worker sets its own number and the one that threads to come start with.
        torch.set_num_threads(threads)


@dataclass(frozen=True, eq=False)
class _Seen:
    """What passes show of linears that share an input: sums over tokens, float32.

    weighted  [K, K] sum of |g|^2 x x^T, g of all of them together
    weight    sum of |g|^2
    second    [K, K] sum of x x^T, None where the method asks for none
    squares   by linear, [N] sum of g_n^2
    """

    weighted: torch.Tensor
    weight: float
    second: torch.Tensor | None
    squares: Mapping[str, torch.Tensor]

    def plus(self, other: "_Seen") -> "_Seen":
        """The sums over the tokens of both; takes the memory of this."""
        second = None
        if self.second is not None and other.second is not None:
            second = self.second.add_(other.second)
        squares = {name: one.add_(other.squares[name]) for name, one in self.squares.items()}
        return _Seen(self.weighted.add_(other.weighted), self.weight + other.weight, second, squares)


class _Measurement:
    """One measurement at work, and how far it is."""

    def __init__(
        self,
        decoder: Decoder,
        method: Method,
        workers: ThreadPoolExecutor,
        lanes: int,
        report: Report | None,
    ) -> None:
        self._decoder, self._method, self._workers, self._lanes = decoder, method, workers, lanes
        self._report, self._done, self._total = report, 0, 0
        self._mutex = threading.Lock()

    def run(
        self, schemes: Mapping[str, Sequence[Scheme]], tokens: torch.Tensor
    ) -> dict[str, tuple[float, ...]]:
        batches = list(torch.split(tokens, micro_batch(len(tokens), BATCH)))
        hidden, blocks = self._decoder.embed(batches, Home(torch.device("cpu")))
        # A pass back takes about as long as two forward, and the head as a block.
        self._total = len(batches) * (3 * len(blocks) + 3) + sum(map(len, schemes.values()))
        before = []
        for block in blocks:
            before.append(hidden)
            with self._decoder.loaded(block):
                hidden = list(self._workers.map(lambda one, block=block: self._forward(block, one), hidden))
        with self._decoder.head() as logits:
            gradients = list(
                self._workers.map(lambda at: self._drawn(logits, hidden[at], at), range(len(hidden)))
            )
        found: dict[str, tuple[float, ...]] = {}
        for block in reversed(blocks):
            wanted = {
                name.removeprefix(f"{block.name}."): row
                for name, row in schemes.items()
                if name.startswith(f"{block.name}.")
            }
            with self._decoder.loaded(block):
                losses, gradients = self._backward(block, before.pop(), gradients, wanted, tokens.numel())
            found |= {f"{block.name}.{name}": one for name, one in losses.items()}
        return {name: found[name] for name in schemes}

    def _step(self, steps: int, label: str) -> None:
        with self._mutex:
            self._done += steps
            if self._report is not None:
                self._report(self._done, self._total, label)

    def _forward(self, block: Block, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            found = block.run(hidden.to(self._decoder.device)).to(hidden.device)
        self._step(1, block.name)
        return found

    def _drawn(
        self, logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, seed: int
    ) -> torch.Tensor:
        """The gradients [B, T, d], at the hidden states after the last block, of the log probability of
        tokens that the model draws.
        """
        generator = torch.Generator().manual_seed(seed)
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        gradient = torch.empty_like(flat)
        start, step = 0, 1
        while start < flat.shape[1]:
            part = flat[:, start : start + step].to(self._decoder.device).requires_grad_()
            with torch.enable_grad():
                scores = logits(part)[0].float().log_softmax(-1)
                bounds = scores.detach().exp().cumsum(-1)
                draws = torch.rand(len(scores), 1, generator=generator).to(bounds.device)
                drawn = torch.searchsorted(bounds, draws * bounds[:, -1:]).clamp_max_(bounds.shape[-1] - 1)
                (found,) = torch.autograd.grad(scores.gather(-1, drawn).sum(), part)
            gradient[:, start : start + step] = found.to(gradient.device)
            # The first token shows how many logits there are for one.
            start, step = start + step, max(1, LOGITS // bounds.shape[-1])
        self._step(3, "predictions")
        return gradient.view_as(hidden)

    def _backward(
        self,
        block: Block,
        hidden: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        wanted: Mapping[str, Sequence[Scheme]],
        tokens: int,
    ) -> tuple[dict[str, tuple[float, ...]], list[torch.Tensor]]:
        """The losses of the linears of a block by their name in it, and the gradients before the block."""
        stages = stages_of(block, hidden[0].to(self._decoder.device), tuple(wanted)) if wanted else []
        seen: list[_Seen] | None = None
        earlier = []

        def one(at: int) -> tuple[torch.Tensor, list[_Seen]]:
            return self._pass(block, hidden[at], gradients[at], stages)

        # No more at a time than there are workers: what passes show is large.
        for at in range(0, len(hidden), self._lanes):
            for gradient, parts in self._workers.map(one, range(at, min(at + self._lanes, len(hidden)))):
                earlier.append(gradient)
                seen = parts if seen is None else [a.plus(b) for a, b in zip(seen, parts, strict=True)]
        losses = {}
        for stage, sums in zip(stages, seen or [], strict=True):
            inputs = None
            if sums.second is not None:
                moments = Moments(sums.second.div_(tokens), tokens)
                inputs = self._workers.submit(Inputs.prepare, moments, [self._method]).result()
            second = sums.weighted.div_(sums.weight) if sums.weight else sums.weighted
            for name in stage:
                weight = block.module.get_submodule(name).weight
                assert isinstance(weight, torch.Tensor)
                rows = self._sample(weight)
                importance = sums.squares[name] / tokens
                # Rows that are larger or matter more lose more: the sample stands for all in that measure.
                energy = importance * (weight.square() @ second.diagonal())
                share = energy[rows].double().sum() / energy.double().sum().clamp_min(1e-300)
                importance = importance[rows] / float(share.clamp_min(1e-30))
                tried = [
                    self._workers.submit(
                        self._loss,
                        f"{block.name}.{name}",
                        weight[rows],
                        importance,
                        second,
                        scheme,
                        inputs,
                    )
                    for scheme in wanted[name]
                ]
                losses[name] = tuple(one.result() for one in tried)
        return losses, earlier

    def _sample(self, weight: torch.Tensor) -> torch.Tensor:
        """The numbers of the rows to quantize, evenly spaced."""
        most = CALIBRATED_ROWS if self._method.needs_data else ROWS
        return torch.arange(0, len(weight), -(-len(weight) // most), device=weight.device)

    def _pass(
        self, block: Block, hidden: torch.Tensor, gradient: torch.Tensor, stages: Sequence[tuple[str, ...]]
    ) -> tuple[torch.Tensor, list[_Seen]]:
        """The gradients before a block, and what one micro-batch shows of its linears."""
        device = self._decoder.device
        inputs: dict[str, torch.Tensor] = {}
        outputs: dict[str, torch.Tensor] = {}
        thread = threading.get_ident()

        def keep(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
            def hook(_: nn.Module, given: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
                # Other workers run the same modules.
                if threading.get_ident() == thread:
                    inputs[name], outputs[name] = given[0].detach(), output

            return hook

        with ExitStack() as stack:
            for name in (name for stage in stages for name in stage):
                handle = block.module.get_submodule(name).register_forward_hook(keep(name))
                stack.callback(handle.remove)
            start = hidden.to(device).requires_grad_()
            with torch.enable_grad():
                after = block.run(start)
            found = torch.autograd.grad(after, [start, *outputs.values()], gradient.to(device))
        slopes = dict(zip(outputs, found[1:], strict=True))
        seen = [
            self._seen(f"{block.name}.{stage[0]}", inputs[stage[0]], {n: slopes[n] for n in stage})
            for stage in stages
        ]
        self._step(2, block.name)
        return found[0].to(hidden.device), seen

    def _seen(self, name: str, inputs: torch.Tensor, slopes: Mapping[str, torch.Tensor]) -> _Seen:
        flat = inputs.reshape(-1, inputs.shape[-1])
        check_finite(flat, name)
        squares = {one: slope.reshape(len(flat), -1).square() for one, slope in slopes.items()}
        weights = torch.stack([square.sum(-1) for square in squares.values()]).sum(0)
        return _Seen(
            gram(flat * weights.sqrt()[:, None]),
            float(weights.double().sum()),
            gram(flat) if self._method.needs_data else None,
            {one: square.sum(0) for one, square in squares.items()},
        )

    def _loss(
        self,
        name: str,
        rows: torch.Tensor,
        importance: torch.Tensor,
        second: torch.Tensor,
        scheme: Scheme,
        inputs: Inputs | None,
    ) -> float:
        """Half the sum over rows [n, K] of `importance` [n] times the row's error in H = `second`."""
        try:
            errors = rows - _stored(rows, scheme, self._method, inputs)
        except FormatError as error:
            raise FormatError(f"'{name}.weight': {error}") from error
        found = ((errors @ second) * errors).double().sum(-1)
        self._step(1, name)
        return max(0.0, 0.5 * float((found * importance).sum()))


def _stored(rows: torch.Tensor, scheme: Scheme, method: Method, inputs: Inputs | None) -> torch.Tensor:
    """What rows [n, K], float32, are as the method stores them."""
    if scheme.is_fitted:
        # Few weights show how they are spread.
        some = rows[::FITTED]
        book = fit_parameters(lambda: iter([some]), (len(some), rows.shape[1]), scheme, method.fit)
        scheme = book.bind(scheme)
    if inputs is None:
        return quantize_tensor(rows, scheme, method=method.name).dequantize(torch.float32)
    shape = (rows.shape[0], rows.shape[1])
    parameters = fit_parameters(
        lambda: iter([inputs.target(rows, method)]), shape, scheme, method.fit, method.fit_tensor
    )
    done: Any = quantize_calibrated_rows(rows, scheme, method, parameters, inputs).rows
    return packed_rows([done], parameters, scheme, shape).dequantize(torch.float32)

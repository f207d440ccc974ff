"""AWQ and SmoothQuant: choose the scales of a block's input features among the candidates of a method.

`calibrate/scaling.py` makes and measures candidates; `fold_scales.py` names the parameters that absorb the
scales.
"""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import Any

import torch

from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.quantize_with_hessian import stored_nearest
from quantkit.calibrate.scaling import Consumer, measured_at_once, output_errors
from quantkit.model.blocks import Block
from quantkit.quantization.blockwise.block_tasks import BlockTasks
from quantkit.quantization.blockwise.fold_scales import Factors, Fold, fold_into, shared_rows
from quantkit.quantization.blockwise.input_groups import Forwards
from quantkit.quantization.blockwise.layer_quantizer import Named, Solver, named_piece
from quantkit.quantization.blockwise.states import States
from quantkit.quantization.task import Task, needs_of


def scale_features(
    block: Block, todo: BlockTasks, states: States, solver: Solver, config: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Choose the scales of a block's input features and put them into the solver's `factors`.

    Returns the changed dense tensors by parameter.
    """
    changed: dict[str, torch.Tensor] = {}
    stops = [fold.consumers[0] for fold in todo.folds]
    if not stops:
        return changed
    find_largest = "largest_input" in needs_of(todo.tasks[name] for name in stops)
    with Forwards(block, states.passes, stops, suspend=False) as forwards:

        def one(lane: int) -> list[Named]:
            found: list[Named] = []
            forwards.visit(
                lane,
                lambda name, inputs: found.append(
                    named_piece(f"{block.name}.{name}", states.runs[lane], inputs, find_largest=find_largest)
                ),
            )
            return found

        hessians = solver.hessians_of_all(one, range(len(states.passes)))
    for fold in todo.folds:
        scales, shared = _scales(
            fold, todo, hessians.pop(f"{block.name}.{fold.consumers[0]}"), solver, config
        )
        if fold.changed in todo.changed:
            stored = solver.read(todo.changed[fold.changed].source.name)
            changed[fold.changed], exact = fold_into(stored, scales)
            # Only a part of a bias passes through the rounded values.
            scales = exact if fold.is_norm else scales
        for consumer in fold.consumers:
            _multiply(solver, todo.tasks[consumer], Factors(columns=scales[shared]))
        if not fold.is_norm:
            _multiply(solver, todo.tasks[fold.producer], Factors(rows=1 / scales))
    return changed


def _scales(
    fold: Fold, todo: BlockTasks, hessian: Hessian, solver: Solver, config: Mapping[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return AWQ's best scales for `fold`, float32 [S], and the index of the scale of each input feature.
    `hessian` is that of the inputs of the linears that `fold` scales. `config` is the model's.
    """
    consumers = []
    tasks = [todo.tasks[name] for name in fold.consumers]
    for task in tasks:
        assert task.scheme is not None and task.method is not None
        weight = solver.read(task.source.name).to(torch.float32)
        scheme = task.scheme
        if scheme.is_fitted:
            # Fitted once: scaling hardly changes the distribution of the weights.
            scheme = solver.fit(task, weight, None).bind(scheme)
        consumers.append(Consumer(weight, scheme))
    columns = consumers[0].weight.shape[1]
    rows = columns if fold.is_norm else todo.tasks[fold.producer].source.shape[0]
    shared = shared_rows(fold, rows, columns, config).to(solver.device)
    method = tasks[0].method
    assert method is not None and method.input_scaling is not None
    stored = partial(stored_nearest, search=method.scale_search)
    tried = method.input_scaling.candidates(consumers, hessian, shared)
    share = [tried[at] for at in solver.ranks.share(len(tried))]
    some = measured_at_once(columns, solver.device)
    found = solver.workers.map(
        lambda at: output_errors(consumers, hessian, torch.stack(share[at : at + some])[:, shared], stored),
        range(0, len(share), some),
    )
    met = solver.ranks.all_gather(list(chain.from_iterable(found)))
    errors = list(chain.from_iterable(met))
    return tried[errors.index(min(errors))], shared


def _multiply(solver: Solver, task: Task, by: Factors) -> None:
    factors = solver.factors.get(task.source.name, Factors())
    solver.factors[task.source.name] = Factors(
        factors.columns if by.columns is None else by.columns, factors.rows if by.rows is None else by.rows
    )

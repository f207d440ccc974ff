"""The forward of a model that decodes: CUDA graphs on a GPU, flat steps on a CPU, or its own."""

from typing import Any

from quantkit.runtime.cuda_graphs import capture
from quantkit.runtime.cuda_graphs.decode import GraphedForward

#: Where a model keeps its graphs.
GRAPHS_OF = "_quantkit_graphs"


def forward_of(model: Any) -> Any:
    """What to call for the tokens of one generation: the graphs of `model` if it has any, else `model`."""
    graphed = graphs_of(model)
    return model if graphed is None else graphed.renew()


def graphs_of(model: Any) -> GraphedForward | None:
    """The graphs of `model`, or flat steps on a CPU; None if it has not the class for them."""
    if not hasattr(type(model), "class_before"):
        return None
    from quantkit.runtime.cpu_steps.flat_forward import FlatForward

    flat = model.device.type == "cpu" and not capture.records_on(model.device)
    kind = FlatForward if flat else GraphedForward
    found: GraphedForward | None = vars(model).get(GRAPHS_OF)
    # It may have been moved.
    if type(found) is not kind:
        found = vars(model)[GRAPHS_OF] = kind(model)
    return found

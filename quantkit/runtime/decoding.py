"""Select what runs decoding steps: CUDA graphs on a GPU, flat steps on a CPU, or the model itself.

A flat step is one traced list of operations, without modules. Code for graphs and flat steps is imported when
a model first runs: transformers imports the plug-in, and so this module, even if no model uses it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quantkit.runtime.cuda_graphs.decode import GraphedForward

#: Attribute of a model that holds its CUDA graphs.
GRAPHS_OF = "_quantkit_graphs"


def forward_of(model: Any) -> Any:
    """Return the callable that computes the tokens of a generation; call this before each generation.

    It is the result of `graphs_of`, whose graphs are dropped if the model changed, or `model` if that is
    None.
    """
    graphed = graphs_of(model)
    return model if graphed is None else graphed.renew()


def graphs_of(model: Any) -> "GraphedForward | None":
    """Return the object that replays decoding steps of `model`; None if the model is not patched.

    The object is a `GraphedForward`, with CUDA graphs, or on a CPU a `FlatForward`. It is stored in the
    model, and created anew after the model moved from CPU to GPU or back. `patches/generation.py` patches
    models.
    """
    if not hasattr(type(model), "class_before"):
        return None
    from quantkit.runtime.cpu_steps.flat_forward import FlatForward
    from quantkit.runtime.cuda_graphs import capture
    from quantkit.runtime.cuda_graphs.decode import GraphedForward

    flat = model.device.type == "cpu" and not capture.captures_on(model.device)
    kind = FlatForward if flat else GraphedForward
    graphs: GraphedForward | None = vars(model).get(GRAPHS_OF)
    # The model may have moved to another device.
    if type(graphs) is not kind:
        graphs = vars(model)[GRAPHS_OF] = kind(model)
    return graphs

"""y = x W^T on packed weights: the functions to call, and the torch operator behind them.

The operator `quantkit::linear` is opaque to torch.compile, which therefore never breaks the graph, and
chooses its row from the table by the number of rows at run time. Its backward pass is in `autograd` and
registered here. Layouts of weights are built here, too.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quantkit.errors import KernelError
from quantkit.kernels.autograd import (
    backward,
    is_transformed,
    refuse_second_order,
    refuse_transforms,
    setup_context,
    setup_nothing,
)
from quantkit.kernels.eager import KernelLayout, is_plain, plan_next, planned
from quantkit.kernels.gemm.unpack import block_rows
from quantkit.kernels.jit.building import building, wait_for
from quantkit.kernels.problem import ACTIVATION_DTYPES, Normed, Outline, Problem
from quantkit.kernels.registry import (
    FORCE_VARIABLE,
    choose,
    forced_row,
    layout_named,
    log_choice,
    warn_unfused,
)
from quantkit.packing.schemes import Scheme, parse_token
from quantkit.packing.tensor import PackedTensor

#: What to do where a part of a norm, or a gate, is meant for another kernel than the one that runs.
_NOT_BETWEEN_RUNS = (
    f"Set {FORCE_VARIABLE} and what else chooses kernels before a model runs, not between two runs."
)
#: torch refuses to be asked about others, such as meta.
_AUTOCAST_DEVICES = ("cpu", "cuda")


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x [..., K] @ packed [N, K]^T + bias [N]`, in x's dtype (float32, bfloat16 or float16).

    Under torch.autocast x and bias are cast as those of `torch.nn.functional.linear` are. The first call
    per activation dtype outside torch.compile builds the layout that is fastest for decoding and keeps it
    with `packed`; compiled code uses the layout if it is there already. Gradients flow to x and bias.
    Raises `KernelError` where shapes, dtypes or devices do not fit, and for gradients of gradients, tangents,
    torch.vmap and transforms of `torch.func`.
    """
    if not isinstance(packed, PackedTensor):
        raise KernelError(
            f"the weight is a {type(packed).__name__}; quantize it first: quantize_tensor(weight)."
        )
    _check_tensor("x", x)
    if bias is not None:
        _check_tensor("bias", bias)
    x, bias = autocast(x), None if bias is None else autocast(bias)
    _check_operands(x, packed, bias)
    cached: tuple[str, KernelLayout | None] | None = packed.kernel_cache.get(_cache_key(x.dtype))
    if not torch.compiler.is_compiling() and (cached is None or cached[0] != forced_row()):
        built = build_layout(packed, x.dtype)
        cached = (forced_row(), built)
        packed.kernel_cache[_cache_key(x.dtype)] = cached
    layout = None if cached is None else cached[1]
    return linear_parts(x, packed.tensors, bias, packed.scheme, packed.shape[0], layout)


def autocast(operand: torch.Tensor) -> torch.Tensor:
    """`operand` of a product in the dtype that torch.autocast asks for, as it is where that is off.

    Before the operator, as layouts belong to a dtype; scales of a weight keep theirs.
    """
    # torch.compile keeps to what is documented.
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return operand
    device = operand.device.type
    if (
        device not in _AUTOCAST_DEVICES
        or not torch.is_autocast_enabled(device)
        or operand.dtype not in ACTIVATION_DTYPES
    ):
        return operand
    return operand.to(torch.get_autocast_dtype(device))


def linear_parts(
    x: torch.Tensor,
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: Scheme | str,
    out_features: int,
    layout: KernelLayout | None,
) -> torch.Tensor:
    """`linear` for a module that holds the parts of the packed weight and its layout itself.

    `parts` are those called `scheme.part_names`, in that order. `scheme` may be given as its token. A layout
    built for another activation dtype is not used. With one of the dtype of x that `can_restore`, the first
    part, the words, may be left out. Joined weights have no parts, only a layout of that dtype. That x has
    as many columns as the weight is for the caller to see to: `check_features`.
    """
    token = scheme if isinstance(scheme, str) else scheme.token
    layout = layout if layout is not None and layout.dtype == x.dtype else None
    if not torch.compiler.is_compiling() and is_plain(x) and _are_plain(parts, bias):
        return _plain_product(x, parts, bias, token, out_features, layout)
    if is_transformed(x):
        refuse_transforms(x, bias, parts)
    tensors, name = ([], "") if layout is None else (list(layout.tensors), layout.name)
    y: torch.Tensor = torch.ops.quantkit.linear(x, list(parts), tensors, bias, token, out_features, name)
    return y


def _are_plain(parts: Sequence[torch.Tensor], bias: torch.Tensor | None) -> bool:
    """`is_plain` of what x is multiplied with."""
    operands = parts if bias is None else (*parts, bias)
    trained = torch.is_grad_enabled()
    return not any(
        type(one) not in (torch.Tensor, nn.Parameter) or one.is_neg() or (trained and one.requires_grad)
        for one in operands
    )


def _plain_product(
    x: torch.Tensor,
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    token: str,
    out_features: int,
    layout: KernelLayout | None,
) -> torch.Tensor:
    """What the operator computes, without torch's dispatcher."""
    if layout is None:
        return run_linear(x, list(parts), [], bias, token, out_features, "")
    y = planned(layout, x, bias, token)
    if y is None:
        y = run_linear(x, list(parts), list(layout.tensors), bias, token, out_features, layout.name)
        plan_next(layout, x, bias, parse_token(token), out_features)
    return y


def build_layout(weight: PackedTensor, activation_dtype: torch.dtype) -> KernelLayout | None:
    """The layout that decoding (one row of x) is fastest with where the weight is; None for none.

    None says that the storage layout itself is what runs. Raises `KernelError` where no row runs it, and
    `FormatError` for codes and scales that are no numbers. Within `building`, a layout may be used, and the
    latter is raised, when that ends.
    """
    problem = Problem.on(weight.device, 1, *weight.shape, weight.scheme, activation_dtype)
    row = choose(problem).row
    if row.layout is None:
        warn_unfused(problem, row)
        return None
    # Tensors of inference mode could not be kept for a backward pass.
    with torch.no_grad(), torch.inference_mode(False), building():
        tensors = row.layout.build(weight, activation_dtype)
    return KernelLayout(row.layout.name, activation_dtype, tensors)


def join_layouts(
    layouts: Sequence[KernelLayout], rows: Sequence[int], scheme: Scheme, k: int
) -> tuple[KernelLayout, tuple[KernelLayout, ...]] | None:
    """Layouts of weights of one `scheme` and K, of so many rows each, as that of one weight, and views of it.

    With the whole, `linear_parts` computes the products of all. None where such layouts do not join.
    """
    names, dtypes = {layout.name for layout in layouts}, {layout.dtype for layout in layouts}
    if len(names) != 1 or len(dtypes) != 1:
        return None
    name, dtype = names.pop(), dtypes.pop()
    with torch.no_grad(), torch.inference_mode(False), building():
        joined = layout_named(name).join([layout.tensors for layout in layouts], rows, scheme, k, dtype)
        if joined is None:
            return None
        whole, parts = joined
        wait_for(whole[0].device)
    return KernelLayout(name, dtype, whole), tuple(KernelLayout(name, dtype, part) for part in parts)


def most_joined_rows(layout: KernelLayout) -> int:
    """Rows of x up to which joined weights in `layout` are multiplied with."""
    return layout_named(layout.name).most_rows


def can_restore(layout: KernelLayout | None) -> bool:
    """Whether the words of the weight can be got back from its layout, so that they need not be kept."""
    return layout is not None and layout_named(layout.name).restore is not None


def restore_words(
    layout: KernelLayout, scheme: Scheme, shape: tuple[int, int], scale: torch.Tensor
) -> torch.Tensor:
    """The words [N, W] of the weight of `shape`, with the part `scale`, that `layout` was built from, which
    `can_restore`.

    torch.compile sees one operator.
    """
    words: torch.Tensor = torch.ops.quantkit.restore_words(
        list(layout.tensors), scale, layout.name, scheme.token, *shape
    )
    return words


def _restored(
    layout: Sequence[torch.Tensor], scale: torch.Tensor, name: str, scheme: Scheme, shape: tuple[int, int]
) -> torch.Tensor:
    restore = layout_named(name).restore
    assert restore is not None, name
    with torch.no_grad():
        return restore(tuple(layout), scheme, shape, scale)


def _cache_key(dtype: torch.dtype) -> str:
    return f"linear {dtype}"


def _check_operands(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> None:
    rows, columns = packed.shape
    check_features(x, columns)
    _check_activations(x, packed.words, bias, rows)


def _check_tensor(name: str, operand: object) -> None:
    if not isinstance(operand, torch.Tensor):
        found = f"{type(operand).__module__}.{type(operand).__qualname__}".removeprefix("builtins.")
        raise KernelError(f"{name} is a {found}; expected a tensor: torch.as_tensor({name}, dtype=...).")


def check_features(x: torch.Tensor, columns: int) -> None:
    """Raise `KernelError` unless rows of `x` are as long as those of a weight. Kernel layouts do not say."""
    if not isinstance(x, torch.Tensor):
        _check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] != columns:
        raise KernelError(
            f"x has shape {tuple(x.shape)}; its last dimension must be the packed weight's "
            f"{columns} input features."
        )


def _check_activations(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
    if x.dtype not in ACTIVATION_DTYPES:
        raise KernelError(
            f"x is {x.dtype}; packed products take float32, bfloat16 or float16. Cast x to one of them."
        )
    if x.device != words.device:
        raise KernelError(
            f"x is on {x.device} and the packed weight on {words.device}; move one of them with .to()."
        )
    if bias is None:
        return
    if tuple(bias.shape) != (rows,):
        raise KernelError(f"bias has shape {tuple(bias.shape)}; the weight has {rows} output features.")
    if bias.dtype != x.dtype or bias.device != x.device:
        raise KernelError(
            f"bias is {bias.dtype} on {bias.device} and x is {x.dtype} on {x.device}; "
            "cast or move the bias to match x."
        )


# `define` and `impl` rather than `custom_op`, whose wrapper imports torch._dynamo at the first call and adds
# 30 us to every one.
torch.library.define(
    "quantkit::linear",
    "(Tensor x, Tensor[] parts, Tensor[] layout, Tensor? bias, str scheme, int out_features, "
    "str layout_name) -> Tensor",
)
#: The operator, as it is in traced graphs.
OPERATOR = torch.ops.quantkit.linear.default
torch.library.define(
    "quantkit::linear_grad_x",
    "(Tensor grad, Tensor[] parts, Tensor[] layout, str scheme, int in_features, str layout_name) -> Tensor",
)
torch.library.define(
    "quantkit::restore_words",
    "(Tensor[] layout, Tensor scale, str layout_name, str scheme, int out_features, int in_features) "
    "-> Tensor",
)


def run_linear(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    layout: list[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: str,
    out_features: int,
    layout_name: str,
    *,
    normed: Normed | None = None,
    gate: str = "",
) -> torch.Tensor:
    """What the operator computes, with the part of a norm that is `normed`, or of that the `gate`, as
    `KernelRow` has them.
    """
    if x.dim() == 0:
        raise KernelError("x is a scalar; its last dimension must be the weight's input features.")
    columns = x.shape[-1]
    parsed = parse_token(scheme)
    _check_activations(x, (parts or layout)[0], bias, out_features)
    flat = x.reshape(-1, columns).contiguous()
    if flat.shape[0] == 0 or out_features == 0:
        return x.new_empty(*x.shape[:-1], out_features)
    if parsed.column_scale:
        # Counted from the end, as the words may be lacking.
        column_scale = parts[parsed.part_names.index("column_scale") - len(parsed.part_names)]
        # Once per activation instead of once per weight, and so in every row; rounded as activations are.
        flat = flat * column_scale.to(x.dtype)
    problem = Problem.on(x.device, flat.shape[0], out_features, columns, parsed, x.dtype, layout_name)
    chosen = choose(problem)
    if chosen.row.layout is None and not parts:
        raise KernelError(
            f"{chosen.row.name} needs the weight as it is stored, and this one was joined with others for "
            f"{layout_name}. Set {FORCE_VARIABLE} before the model is loaded."
        )
    log_choice(problem, chosen)
    if normed is not None and (reason := chosen.row.no_norm(problem, chosen.tile, normed.part)) is not None:
        raise KernelError(
            f"{chosen.row.name}, which runs {problem}, does not do a norm ({normed.part}): {reason}. "
            f"{_NOT_BETWEEN_RUNS}"
        )
    if gate and (reason := chosen.row.no_gate(problem, chosen.tile)) is not None:
        raise KernelError(
            f"{chosen.row.name}, which runs {problem}, does not gate y: {reason}. {_NOT_BETWEEN_RUNS}"
        )
    shape = (out_features, columns)
    # The whole weight only where it is used: to check its parts takes longer than to launch most kernels.
    outlined = not parts or (chosen.row.layout is not None and chosen.row.layout.whole)
    weight = Outline(parsed, shape) if outlined else _whole(parts, layout, layout_name, parsed, shape)
    options: dict[str, Any] = {} if normed is None else {"normed": normed}
    options |= {"gate": gate} if gate else {}
    given = tuple(layout) if chosen.row.layout is not None else ()
    y = chosen.launch(flat, weight, given, bias, **options)
    return y.view(*x.shape[:-1], y.shape[-1])


torch.library.impl("quantkit::linear", "default", run_linear)


def _whole(
    parts: Sequence[torch.Tensor],
    layout: Sequence[torch.Tensor],
    layout_name: str,
    scheme: Scheme,
    shape: tuple[int, int],
) -> PackedTensor:
    """The weight with all its parts, of which the words may be in its layout only."""
    if layout and len(parts) < len(scheme.part_names):
        parts = (_restored(layout, parts[0], layout_name, scheme, shape), *parts)
    return PackedTensor(tuple(parts), scheme, shape)


@torch.library.impl("quantkit::restore_words", "default")
def _restore_words(
    layout: list[torch.Tensor],
    scale: torch.Tensor,
    layout_name: str,
    scheme: str,
    out_features: int,
    in_features: int,
) -> torch.Tensor:
    return _restored(layout, scale, layout_name, parse_token(scheme), (out_features, in_features))


def _restore_words_fake(
    layout: list[torch.Tensor],
    scale: torch.Tensor,
    layout_name: str,
    scheme: str,
    out_features: int,
    in_features: int,
) -> torch.Tensor:
    words = parse_token(scheme).words_per_row(in_features)
    return layout[0].new_empty(out_features, words, dtype=torch.int32)


def _linear_fake(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    layout: list[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: str,
    out_features: int,
    layout_name: str,
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.impl("quantkit::linear_grad_x", "default")
def _linear_grad_x(
    grad: torch.Tensor,
    parts: list[torch.Tensor],
    layout: list[torch.Tensor],
    scheme: str,
    in_features: int,
    layout_name: str,
) -> torch.Tensor:
    """`grad [..., N] @ W [N, K]` in grad's dtype, unpacking a block of rows at a time."""
    rows = grad.shape[-1]
    weight = _whole(parts, layout, layout_name, parse_token(scheme), (rows, in_features))
    zeros = weight.zero_points()
    flat = grad.reshape(-1, rows).float()
    out = torch.zeros(flat.shape[0], in_features, dtype=torch.float32, device=grad.device)
    step = block_rows(in_features, grad.device)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = weight.without_column_scale(start, stop, None if zeros is None else zeros[start:stop])
        out.addmm_(flat[:, start:stop], block)
    column_scale = weight.part("column_scale")
    if column_scale is not None:
        out.mul_(column_scale.float())
    return out.to(grad.dtype).view(*grad.shape[:-1], in_features)


def _linear_grad_x_fake(
    grad: torch.Tensor,
    parts: list[torch.Tensor],
    layout: list[torch.Tensor],
    scheme: str,
    in_features: int,
    layout_name: str,
) -> torch.Tensor:
    return grad.new_empty(*grad.shape[:-1], in_features)


torch.library.register_fake("quantkit::linear", _linear_fake)
torch.library.register_fake("quantkit::linear_grad_x", _linear_grad_x_fake)
torch.library.register_fake("quantkit::restore_words", _restore_words_fake)
torch.library.register_autograd("quantkit::linear", backward, setup_context=setup_context)
torch.library.register_autograd("quantkit::linear_grad_x", refuse_second_order, setup_context=setup_nothing)

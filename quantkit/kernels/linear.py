"""Linear on packed weights, y = x W^T: functions to call, layouts, and the torch operator behind them.

The operator `quantkit::linear` is opaque to torch.compile, so that graphs do not break. It selects its kernel
at run time, by M (rows of x). Its backward pass is in `autograd` and registered here.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from quantkit.errors import KernelError
from quantkit.kernels.autograd import backward, is_transformed, refuse_transforms, setup_context
from quantkit.kernels.eager import KernelLayout, is_eager, is_plain, plan_next, planned
from quantkit.kernels.linear_grad import Weight, eager_linear
from quantkit.kernels.ops.quantize_x import QuantizedX, round_x
from quantkit.kernels.problem import ACTIVATION_DTYPES, Normed, Outline, Problem
from quantkit.kernels.registry import (
    FORCE_VARIABLE,
    choose,
    forced_kernel,
    log_choice,
)
from quantkit.kernels.weight_layouts import build_layout, restored_words, whole_weight
from quantkit.packing.schemes import Scheme, parse_token
from quantkit.packing.tensor import PackedTensor

#: Remedy if a part of a norm, or a gate, was planned for another kernel than the one that runs.
_NOT_BETWEEN_RUNS = (
    f"Set {FORCE_VARIABLE} and what else chooses kernels before a model runs, not between two runs."
)
#: Devices with autocast; torch raises for others, such as meta.
_AUTOCAST_DEVICES = ("cpu", "cuda")


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return `x [..., K] @ packed [N, K]^T + bias [N]`: [..., N] in x's dtype (float32, bfloat16 or float16).

    Under torch.autocast, x and bias are cast as by `torch.nn.functional.linear`. The first call per
    activation dtype outside torch.compile builds the layout that is fastest for decoding, and stores it in
    `packed`. Compiled code uses an existing layout. Gradients flow to x and bias.

    Raises `KernelError` if shapes, dtypes or devices do not fit, and for second-order gradients, tangents,
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
    key = f"linear {x.dtype}"
    cached: tuple[str, KernelLayout | None] | None = packed.kernel_cache.get(key)
    if not torch.compiler.is_compiling() and (cached is None or cached[0] != forced_kernel()):
        built = build_layout(packed, x.dtype)
        cached = (forced_kernel(), built)
        packed.kernel_cache[key] = cached
    layout = None if cached is None else cached[1]
    return linear_parts(x, packed.tensors, bias, packed.scheme, packed.shape[0], layout)


def autocast(operand: torch.Tensor) -> torch.Tensor:
    """Return `operand` [...] of a linear in the dtype of torch.autocast; unchanged outside autocast.

    This runs before the operator, because a layout is built for one dtype. Scales keep their dtype.
    """
    dtype = autocast_dtype(operand)
    return operand if dtype is None else operand.to(dtype)


def autocast_dtype(operand: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which torch.autocast casts `operand` of a linear, [...]; None outside it."""
    # torch.compile understands only documented functions.
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return None
    device = operand.device.type
    if (
        device not in _AUTOCAST_DEVICES
        or not torch.is_autocast_enabled(device)
        or operand.dtype not in ACTIVATION_DTYPES
    ):
        return None
    return torch.get_autocast_dtype(device)


def linear_parts(
    x: torch.Tensor,
    parts: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: Scheme | str,
    out_features: int,
    layout: KernelLayout | None,
) -> torch.Tensor:
    """Compute y = x W^T + bias, [..., N], for a weight whose tensors a module holds itself.

        x               [..., K], rounded as the scheme says; the caller checks K (`check_features`)
        parts           tensors of the packed weight, named `scheme.part_names`, in that order
        bias            [N], or None
        scheme          scheme of the weight, or its token
        out_features    N
        layout          the weight as repacked for a kernel, or None; not used if it is for another dtype of x

    `parts` may lack its first tensor, the words, if they can be restored from a `layout` for the dtype of x
    (`can_restore`). `parts` is empty for weights that were joined; they have such a layout.
    """
    token = scheme if isinstance(scheme, str) else scheme.token
    layout = layout if layout is not None and layout.dtype == x.dtype else None
    operands = parts if bias is None else (*parts, bias)
    if not torch.compiler.is_compiling() and is_eager(x) and are_tensors(operands):
        weight = Weight(parts, layout, token, out_features)
        if is_plain(x) and not are_trained(operands):
            return plain_product(x, bias, weight)
        if x.requires_grad and not are_trained(parts):
            return eager_linear(x, bias, weight, plain_product)
    if is_transformed(x):
        refuse_transforms(x, bias, parts)
    tensors, name = ([], "") if layout is None else (list(layout.tensors), layout.name)
    y: torch.Tensor = torch.ops.quantkit.linear(x, list(parts), tensors, bias, token, out_features, name)
    return y


def are_tensors(operands: Sequence[torch.Tensor]) -> bool:
    """Return True if each of `operands` [...] is a tensor or parameter, and no view with a pending negation.

    False for other subclasses of `torch.Tensor`.
    """
    return not any(type(one) not in (torch.Tensor, nn.Parameter) or one.is_neg() for one in operands)


def are_trained(operands: Sequence[torch.Tensor]) -> bool:
    """Return True if autograd is on and one of `operands` [...] requires a gradient."""
    return torch.is_grad_enabled() and any(one.requires_grad for one in operands)


def plain_product(x: torch.Tensor, bias: torch.Tensor | None, weight: Weight) -> torch.Tensor:
    """Compute y [..., N] = `x` [..., K] W^T + `bias` [N] without torch's dispatcher, gradients or tracing."""
    parts, layout, token, rows = weight
    if layout is None:
        return run_linear(x, list(parts), [], bias, token, rows, "")
    y = planned(layout, x, bias, token)
    if y is None:
        y = run_linear(x, list(parts), list(layout.tensors), bias, token, rows, layout.name)
        plan_next(layout, x, bias, parse_token(token), rows)
    return y


def restore_words(
    layout: KernelLayout, scheme: Scheme, shape: tuple[int, int], scale: torch.Tensor
) -> torch.Tensor:
    """Return the stored words int32 [N, words per row] of a weight of `shape` [N, K], from its kernel layout.

    `scale` are the scales as stored. `can_restore(layout)` must be true. torch.compile sees a single
    operator.
    """
    words: torch.Tensor = torch.ops.quantkit.restore_words(
        list(layout.tensors), scale, layout.name, scheme.token, *shape
    )
    return words


def _check_operands(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> None:
    """Raise `KernelError` unless `x` [..., K], `packed` [N, K] and `bias` [N] fit each other."""
    rows, columns = packed.shape
    check_features(x, columns)
    _check_activations(x, packed.words, bias, rows)


def _check_tensor(name: str, operand: object) -> None:
    if not isinstance(operand, torch.Tensor):
        found = f"{type(operand).__module__}.{type(operand).__qualname__}".removeprefix("builtins.")
        raise KernelError(f"{name} is a {found}; expected a tensor: torch.as_tensor({name}, dtype=...).")


def check_features(x: torch.Tensor, columns: int) -> None:
    """Raise `KernelError` unless `x` [..., K] has `columns` columns. Kernel layouts do not store K."""
    if not isinstance(x, torch.Tensor):
        _check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] != columns:
        raise KernelError(
            f"x has shape {tuple(x.shape)}; its last dimension must be the packed weight's "
            f"{columns} input features."
        )


def _check_activations(x: torch.Tensor, words: torch.Tensor, bias: torch.Tensor | None, rows: int) -> None:
    """Raise `KernelError` unless `x` [..., K], `words` [N, ...] and `bias` fit in dtype and device.

    `bias` must be None or [rows]; `rows` is the number of output features, N.
    """
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


# `define` and `impl`, because `custom_op` imports torch._dynamo at the first call and adds 30 us to every
# call.
torch.library.define(
    "quantkit::linear",
    "(Tensor x, Tensor[] parts, Tensor[] layout, Tensor? bias, str scheme, int out_features, "
    "str layout_name) -> Tensor",
)
#: The operator as it occurs in traced graphs.
OPERATOR = torch.ops.quantkit.linear.default
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
    codes: QuantizedX | None = None,
) -> torch.Tensor:
    """Compute y = x W^T + bias, [..., N], for `x` [..., K]; select the kernel that does it.

        parts           the tensors of W [N, K] as stored
        layout          the tensors of W, repacked in the layout `layout_name`
        bias            [N], or None
        scheme          a `Scheme.token`
        out_features    N
        normed          RMSNorm, or one of its two parts, that the kernel computes too (`problem.Normed`)
        gate            activation f: y [..., N / 2] = f(first half of columns) * second half; "" for no gate
        codes           x as 8-bit codes; if given, only shape and dtype of `x` are read

    Raises `KernelError` for a scalar x, and if the kernel cannot do what `normed`, `gate` or `codes` ask for.
    """
    if x.dim() == 0:
        raise KernelError("x is a scalar; its last dimension must be the weight's input features.")
    columns = x.shape[-1]
    asked = parse_token(scheme)
    parsed, rounding = asked.of_weights, asked.activations
    _check_activations(x, (parts or layout)[0], bias, out_features)
    flat = x.reshape(-1, columns)
    flat = flat if codes is not None else flat.contiguous()
    if flat.shape[0] == 0 or out_features == 0:
        return x.new_empty(*x.shape[:-1], out_features)
    if parsed.column_scale:
        if rounding is not None:
            # What is rounded is x as it is.
            flat, asked, rounding = round_x(flat, rounding), parsed, None
        # Counted from the end, as the words may be missing.
        column_scale = parts[parsed.part_names.index("column_scale") - len(parsed.part_names)]
        # Scale x, not W, so that every kernel supports it; rounded like activations.
        flat = flat * column_scale.to(x.dtype)
    problem = Problem.on(x.device, flat.shape[0], out_features, columns, asked, x.dtype, layout_name)
    chosen = choose(problem)
    if rounding is not None and codes is None and not chosen.rounds(problem):
        flat, rounding = round_x(flat, rounding), None
    if chosen.kernel.layout is None and not parts:
        raise KernelError(
            f"{chosen.kernel.name} needs the weight as it is stored, and this one was joined with others for "
            f"{layout_name}. Set {FORCE_VARIABLE} before the model is loaded."
        )
    log_choice(problem, chosen)
    if (
        normed is not None
        and (reason := chosen.kernel.why_no_norm(problem, chosen.tile, normed.part)) is not None
    ):
        raise KernelError(
            f"{chosen.kernel.name}, which runs {problem}, does not do a norm ({normed.part}): {reason}. "
            f"{_NOT_BETWEEN_RUNS}"
        )
    if gate and (reason := chosen.kernel.why_no_gate(problem, chosen.tile)) is not None:
        raise KernelError(
            f"{chosen.kernel.name}, which runs {problem}, does not gate y: {reason}. {_NOT_BETWEEN_RUNS}"
        )
    order_of = chosen.kernel.code_order
    if codes is not None and (order_of is None or order_of(problem) != codes.order):
        raise KernelError(
            f"{chosen.kernel.name}, which runs {problem}, does not read codes of x in this order. "
            f"{_NOT_BETWEEN_RUNS}"
        )
    shape = (out_features, columns)
    # The whole weight only if it is used: checking its tensors takes longer than launching most kernels.
    outlined = not parts or (chosen.kernel.layout is not None and chosen.kernel.layout.whole)
    weight = Outline(parsed, shape) if outlined else whole_weight(parts, layout, layout_name, parsed, shape)
    options: dict[str, Any] = {} if normed is None else {"normed": normed}
    options |= ({"gate": gate} if gate else {}) | ({} if rounding is None else {"activations": rounding})
    options |= {} if codes is None else {"codes": codes}
    given = tuple(layout) if chosen.kernel.layout is not None else ()
    y = chosen.launch(flat, weight, given, bias, **options)
    # Not an autograd view: models may change it in place, as Llama 4 adds its experts to a shared one.
    shaped: torch.Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[-1]])
    return shaped


torch.library.impl("quantkit::linear", "default", run_linear)


@torch.library.impl("quantkit::restore_words", "default")
def _restore_words(
    layout: list[torch.Tensor],
    scale: torch.Tensor,
    layout_name: str,
    scheme: str,
    out_features: int,
    in_features: int,
) -> torch.Tensor:
    """Compute the operator `quantkit::restore_words`: stored words int32 [N, words per row] of a weight.

    The weight is [out_features, in_features]; its `layout` is called `layout_name`. `scale` are its scales as
    stored, `scheme` is a `Scheme.token`.
    """
    return restored_words(layout, scale, layout_name, parse_token(scheme), (out_features, in_features))


def _restore_words_fake(
    layout: list[torch.Tensor],
    scale: torch.Tensor,
    layout_name: str,
    scheme: str,
    out_features: int,
    in_features: int,
) -> torch.Tensor:
    """Return empty words, int32 [N, words per row], for tracing."""
    words = parse_token(scheme).words_per_row(in_features)
    return layout[0].new_empty(out_features, words, dtype=torch.int32)


def _linear_fake(
    x: torch.Tensor, parts: object, layout: object, bias: object, scheme: object, out_features: int, _: object
) -> torch.Tensor:
    """Return an empty y [..., N] of `x` [..., K], for tracing."""
    return x.new_empty(*x.shape[:-1], out_features)


torch.library.register_fake("quantkit::linear", _linear_fake)
torch.library.register_fake("quantkit::restore_words", _restore_words_fake)
torch.library.register_autograd("quantkit::linear", backward, setup_context=setup_context)

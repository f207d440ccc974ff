"""Derivatives of packed products beyond the backward pass are refused: torch would leave the product out."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

from quantkit.errors import KernelError
from quantkit.kernels.linear import linear

from ..support.compare import assert_equal

X = torch.ones(3, 64)
BIAS = torch.ones(16)
REFUSED = "no forward derivatives, and do not go with torch.vmap and torch.func. Use backward"


def dual(product, x, bias):
    with forward_ad.dual_level():
        return product(x(), bias())


def reverse_over_vmap(product):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(func.vmap(lambda row: product(row, BIAS) ** 2)(x).sum(), x)


def has_tangent(one):
    return lambda: forward_ad.make_dual(one, one)


TRANSFORMS = {
    "jvp over x": lambda product: func.jvp(lambda x: product(x, None), (X,), (X,)),
    "jvp over bias": lambda product: func.jvp(lambda bias: product(X, bias), (BIAS,), (BIAS,)),
    "dual x": lambda product: dual(product, has_tangent(X), lambda: BIAS),
    "dual bias": lambda product: dual(product, lambda: X, has_tangent(BIAS)),
    "grad": lambda product: func.grad(lambda x: product(x, BIAS).sum())(X),
    "vjp": lambda product: func.vjp(product, X, BIAS),
    "hessian": lambda product: func.hessian(lambda x: (product(x, BIAS) ** 3).sum())(X[0]),
    "vmap": lambda product: func.vmap(product, (0, None))(X, BIAS),
    "backward of vmap": reverse_over_vmap,
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_are_refused(transform, make_packed):
    packed = make_packed("int4", (16, 64))
    with pytest.raises(KernelError, match=REFUSED):
        transform(lambda x, bias: linear(x, packed, bias))


def test_a_scale_with_a_tangent_is_refused(make_packed):
    packed = make_packed("int4", (16, 64))
    with pytest.raises(KernelError, match=REFUSED), forward_ad.dual_level():
        scale = forward_ad.make_dual(packed.scale, packed.scale)
        linear(X, packed.__class__((packed.words, scale), packed.scheme, packed.shape))


def test_products_without_tangents_run_where_others_have_them(make_packed):
    packed = make_packed("int4", (16, 64), exact=True)
    expected = linear(X, packed, BIAS)
    with forward_ad.dual_level():
        assert_equal(linear(X, packed, BIAS), expected)


def test_tangents_under_torch_compile_are_refused(make_packed):
    packed = make_packed("int4", (16, 64))

    def tangent(x):
        return func.jvp(lambda x: linear(x, packed), (x,), (x,))[1]

    with pytest.raises(KernelError, match=REFUSED):
        torch.compile(tangent, backend="aot_eager")(X)
    torch.compiler.reset()


def test_gradients_of_gradients_are_refused(make_packed):
    packed = make_packed("int4", (16, 64))
    x = X.clone().requires_grad_()
    (grad,) = torch.autograd.grad((linear(x, packed) ** 3).sum(), x, create_graph=True)
    with pytest.raises(KernelError, match=r"no gradients of gradients\. Leave out create_graph=True"):
        # The rest of the graph would give a number.
        torch.autograd.grad((grad**2).sum() + (x**3).sum(), x)


@pytest.mark.parametrize("shape", [(3, 64), (1, 3, 64)])
def test_a_product_may_be_changed_in_place_before_the_backward_pass(make_packed, shape):
    packed = make_packed("int4", (16, 64))
    gradients = []
    for change in (torch.Tensor.add_, torch.Tensor.add):
        x = X.clone().view(shape).requires_grad_()
        change(linear(x, packed), 1.0).square().sum().backward()
        gradients.append(x.grad)
    assert_equal(*gradients)

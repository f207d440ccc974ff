"""torch's transforms over packed products: tangents, gradients and vmap, against the dense product."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch.nn import functional

from quantkit.errors import KernelError
from quantkit.kernels.linear import linear


def integers(*sizes, seed=0):
    return torch.randint(-4, 5, sizes, generator=torch.Generator().manual_seed(seed)).float()


X, DX, BIAS, DBIAS = integers(3, 64), integers(3, 64, seed=1), integers(16, seed=2), integers(16, seed=3)


def dual(product):
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(product(forward_ad.make_dual(X, DX), BIAS)))


def reverse_over_forward(product):
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        y = product(forward_ad.make_dual(x, DX), BIAS)
        return torch.autograd.grad(forward_ad.unpack_dual(y**3).tangent.sum(), x)


def forward_over_reverse(product):
    x = X.clone().requires_grad_()
    with forward_ad.dual_level():
        y = product(forward_ad.make_dual(x, DX), BIAS)
        (grad,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        return tuple(forward_ad.unpack_dual(grad))


def reverse_over_vmap(product):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(func.vmap(lambda row: product(row, BIAS) ** 2)(x).sum(), x)


def over_bias_within(product):
    """x has a tangent of the outer jvp only."""

    def inner(x):
        return func.jvp(lambda bias: product(x**2, bias) ** 2, (BIAS,), (DBIAS,))[1]

    return func.jvp(inner, (X,), (DX,))


def cubes(product):
    return lambda x, bias: (product(x, bias) ** 3).sum()


TANGENTS = {
    "x": lambda product: func.jvp(lambda x: product(x, None), (X,), (DX,)),
    "x, one vector": lambda product: func.jvp(lambda x: product(x, BIAS), (X[0],), (DX[0],)),
    "bias": lambda product: func.jvp(lambda bias: product(X, bias), (BIAS,), (DBIAS,)),
    "x and bias": lambda product: func.jvp(product, (X, BIAS), (DX, DBIAS)),
    "dual numbers": dual,
    "reverse over forward": reverse_over_forward,
    "forward over reverse": forward_over_reverse,
    "jvp of jvp": lambda product: func.jvp(
        lambda y: func.jvp(lambda x: product(x, BIAS) ** 2, (y,), (DX,))[1], (X,), (DX,)
    ),
    "jvp of jvp over bias": over_bias_within,
    "jacfwd of jacfwd": lambda product: (
        func.jacfwd(func.jacfwd(lambda x: (product(x, BIAS) ** 2).sum()))(X[0]),
    ),
    "jvp of grad": lambda product: func.jvp(func.grad(lambda x: (product(x, BIAS) ** 3).sum()), (X,), (DX,)),
    "jvp of vmap": lambda product: func.jvp(func.vmap(lambda x: product(x, BIAS)), (X,), (DX,)),
}
GRADIENTS = {
    "x and bias": lambda product: func.grad(cubes(product), (0, 1))(X, BIAS),
    "vjp": lambda product: func.vjp(product, X, BIAS)[1](integers(3, 16, seed=4)),
    "grad of grad": lambda product: (
        func.grad(lambda x: (func.grad(cubes(product))(x, BIAS) ** 2).sum())(X),
    ),
    "grad of vmap": lambda product: func.grad(cubes(func.vmap(product, (0, None))), (0, 1))(X, BIAS),
    "vmap of grad": lambda product: func.vmap(func.grad(cubes(product), (0, 1)), (0, None))(X, BIAS),
    "hessian": lambda product: (func.hessian(cubes(product))(X[0], BIAS),),
    "jacrev of jacfwd": lambda product: (func.jacrev(func.jacfwd(cubes(product)))(X[0], BIAS),),
}
MAPS = {
    "x": lambda product: (func.vmap(lambda x: product(x, BIAS))(X),),
    "x, inner dimension": lambda product: (func.vmap(product, (1, None))(X.expand(5, 3, 64), BIAS),),
    "bias": lambda product: (func.vmap(product, (None, 1))(X, torch.stack((BIAS, DBIAS), 1)),),
    "x and bias": lambda product: (func.vmap(product)(torch.stack((X, DX)), torch.stack((BIAS, DBIAS))),),
    "twice": lambda product: (func.vmap(func.vmap(product, (0, None)), (0, None))(X.expand(2, 3, 64), BIAS),),
    "backward": reverse_over_vmap,
}


@pytest.fixture(params=["int4", "nvfp4", "binary-rank1"])
def products(request, make_packed):
    """The packed product and its dense twin."""
    packed = make_packed(request.param, (16, 64), group_size=32, exact=True)
    dense = packed.dequantize()
    return (lambda x, bias: linear(x, packed, bias)), (lambda x, bias: functional.linear(x, dense, bias))


def check(transformed, products):
    found, expected = map(transformed, products)
    assert any(one.count_nonzero() for one in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=0)


@pytest.mark.parametrize("transformed", TANGENTS.values(), ids=TANGENTS)
def test_tangents_are_those_of_the_dense_product(transformed, products):
    check(transformed, products)


@pytest.mark.parametrize("transformed", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_within_transforms_are_those_of_the_dense_product(transformed, products):
    check(transformed, products)


@pytest.mark.parametrize("transformed", MAPS.values(), ids=MAPS)
def test_vmap_is_that_of_the_dense_product(transformed, products):
    check(transformed, products)


def test_tangents_under_torch_compile_are_computed_eagerly_or_refused(make_packed):
    packed = make_packed("int4", (16, 64), exact=True)

    def tangent(x, dx):
        return func.jvp(lambda x: linear(x, packed), (x,), (dx,))[1]

    compiled = torch.compile(tangent, backend="aot_eager")
    assert torch.equal(compiled(X, DX), linear(DX, packed))
    torch.compiler.reset()
    with pytest.raises(Exception, match="raise KernelError"):
        torch.compile(tangent, backend="aot_eager", fullgraph=True)(X, DX)


def test_a_scale_with_a_tangent_is_refused(make_packed):
    packed = make_packed("int4", (16, 64))
    with pytest.raises(KernelError, match=r"a scale .* has a tangent.*detach"), forward_ad.dual_level():
        packed = packed.__class__(
            (packed.words, forward_ad.make_dual(packed.scale, packed.scale)), packed.scheme, packed.shape
        )
        linear(X, packed)


def test_vmap_over_weights_is_refused(make_packed):
    packed = make_packed("int4", (16, 64))
    token, (words, scale) = packed.scheme.token, packed.tensors
    with pytest.raises(KernelError, match="Loop over the weights"):
        func.vmap(lambda words: torch.ops.quantkit.linear(X, [words, scale], [], None, token, 16, ""))(
            words[None]
        )

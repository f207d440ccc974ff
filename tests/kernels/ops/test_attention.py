"""Attention of one token against softmax in float64: in Triton's interpreter on a CPU, for real on a GPU."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad

from quantkit.kernels.gemm.gpu_limits import H200_PROCESSORS, HOPPER_SHARED
from quantkit.kernels.ops import attention
from quantkit.kernels.ops.attention import (
    PLANS,
    decode_attention,
    rotated_attention,
    rotates,
    why_not,
)
from quantkit.kernels.ops.norm import HeadNorms, rms_norm
from quantkit.kernels.ops.rope import rotate_append
from quantkit.kernels.problem import GPU_FEATURES, Gpu

from ...support.compare import assert_close, assert_equal

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Weights are rounded before they are multiplied, and outputs.
LIMIT = {torch.bfloat16: 1e-2, torch.float16: 1e-3}


def inputs(heads, key_heads, length, size, width, batch=2, dtype=torch.float16, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    return (
        numbers(batch, heads, 1, size),
        numbers(batch, key_heads, length, size),
        numbers(batch, key_heads, length, width),
    )


def slow(query, key, value, mask, scaling):
    """The obvious twin, in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = (part.double().repeat_interleave(group, 1) for part in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return (scores.softmax(-1) @ value).transpose(1, 2)


#: Plans, and programs for a multiprocessor, of which there is one: all there is of keys and warps, with one
#: program for all keys of a head and with many.
SHARED = [(1, 64), (2, 1), (3, 64), (4, 1)]


@pytest.fixture(params=SHARED)
def shares(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    number, programs = request.param
    monkeypatch.setattr(attention, "PLANS", (replace(PLANS[number], most=math.inf, programs=programs),))
    attention._plan.cache_clear()
    yield
    attention._plan.cache_clear()


@pytest.mark.parametrize(
    ("heads", "key_heads", "length", "size", "width"),
    [(4, 2, 200, 64, 64), (3, 3, 1, 16, 16), (8, 1, 65, 80, 48), (20, 1, 130, 32, 128), (9, 1, 64, 256, 256)],
)
@pytest.mark.parametrize("kind", ["none", "bool", "float", "one for all"])
@pytest.mark.sampled(6)
def test_it_is_attention(poisoned, shares, heads, key_heads, length, size, width, kind):
    for dtype, limit in LIMIT.items():
        query, key, value = inputs(heads, key_heads, length, size, width, dtype=dtype)
        mask = torch.rand(2, 1, 1, length, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5
        mask[..., 0] = True
        if kind == "float":
            mask = torch.where(mask, torch.randn(mask.shape, device=DEVICE), -math.inf).to(dtype)
        mask = {"none": None, "one for all": mask[:1]}.get(kind, mask)
        assert why_not(query, key, value, mask) in (None, "it runs on cuda, the tensors are on cpu")
        found = decode_attention(query, key, value, mask, 0.3)
        assert found.shape == (2, 1, heads, width) and found.dtype == dtype
        expected = slow(query, key, value, mask, 0.3)
        assert (found.double() - expected).norm() < limit * expected.norm()
        # On a CPU there is nothing that could run in another order.
        if DEVICE == "cuda":
            assert_equal(found, decode_attention(query, key, value, mask, 0.3))


def in_two_launches(*given):
    """The twin of `rotated_attention`: a token is rotated and kept first."""
    *token, mask, scaling = given
    return decode_attention(*rotate_append(*token), mask, scaling)


def rotated_inputs(heads, key_heads, length, size, width, held, dtype, sequences=2, angles=2):
    """As `rotated_attention` takes them; what the cache does not hold yet is no number."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    # As a product of one weight has them.
    made = numbers(sequences, 1, heads * size + key_heads * (size + width))
    queries, new_keys, new_values = made.split((heads * size, key_heads * size, key_heads * width), -1)
    new = (
        part.view(sequences, 1, number, -1).transpose(1, 2)
        for part, number in ((queries, heads), (new_keys, key_heads), (new_values, key_heads))
    )
    keys, values = (numbers(sequences, key_heads, length, features) for features in (size, width))
    for part in (keys, values):
        part[:, :, held:] = math.nan
    turn = numbers(angles, 1, 1, size).float() * 3
    # Zeros have signs.
    made[..., ::5] = 0.0
    made[..., ::7] *= -1
    return *new, turn.cos().to(dtype), turn.sin().to(dtype), keys, values, torch.tensor(held, device=DEVICE)


@pytest.mark.parametrize(
    ("heads", "key_heads", "length", "size", "width", "held", "angles"),
    [
        (4, 2, 200, 64, 64, 130, 2),
        (3, 3, 1, 16, 16, 0, 1),
        (8, 1, 65, 80, 48, 64, 2),
        (20, 1, 130, 32, 128, 3, 1),
        (9, 1, 64, 250, 256, 40, 2),
        (9, 1, 64, 74, 8, 63, 1),
    ],
)
@pytest.mark.parametrize("kind", ["none", "bool", "float"])
@pytest.mark.sampled(6)
def test_a_token_is_rotated_and_kept(
    poisoned, shares, heads, key_heads, length, size, width, held, angles, kind
):
    """To the bit what kernels one after the other compute, in the results and in the cache."""
    # The interpreter takes long, and masks change nothing of how numbers are rounded.
    dtypes = {"none": [torch.bfloat16], "float": [torch.float16]} if DEVICE == "cpu" else {}
    for dtype in dtypes.get(kind, LIMIT):
        given = rotated_inputs(heads, key_heads, length, size, width, held, dtype, angles=angles)
        *new, keys, values, held_of = given
        mask = (torch.arange(length, device=DEVICE) <= held).expand(2, 1, 1, length)
        if kind == "float":
            mask = torch.where(mask, 0.5, -math.inf).to(dtype)
        if kind == "none":
            mask = None
            for part in (keys, values):
                part[:, :, held:] = 1
        # On a CPU, where no launches overlap, the kernel is the same for both.
        ways = (False, True) if DEVICE == "cuda" else (True,)
        caches = [(keys.clone(), values.clone()) for _ in range(1 + len(ways))]
        expected = in_two_launches(*new, *caches[0], held_of, mask, 0.3)
        assert expected.isfinite().all()
        for cache_ready, cache in zip(ways, caches[1:], strict=True):
            found = rotated_attention(*new, *cache, held_of, mask, 0.3, cache_ready=cache_ready)
            for one, other in zip((expected, *caches[0]), (found, *cache), strict=True):
                assert_equal(one.view(torch.int16), other.view(torch.int16))


@pytest.mark.parametrize(
    ("heads", "key_heads", "size", "held", "kind"),
    [
        (4, 2, 64, 130, "llama"),
        (4, 2, 64, 130, "gemma"),
        (9, 1, 80, 3, "llama"),
        (8, 1, 250, 64, "olmo"),
        (2, 2, 16, 0, "gemma"),
    ],
)
@pytest.mark.sampled(4)
def test_norms_of_heads_are_taken_before(poisoned, shares, heads, key_heads, size, held, kind):
    """Of whole numbers, whose squares are summed exactly in any order: to the bit as by three launches."""
    # The interpreter takes long.
    for dtype in LIMIT if DEVICE == "cuda" else (torch.bfloat16,):
        q, k, *rest = rotated_inputs(heads, key_heads, 150, size, 32, held, dtype)
        q, k = ((4 * one).round() for one in (q, k))
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(size, generator=generator).to(DEVICE, dtype) for _ in range(2)]
        *new, keys, values, held_of = rest
        mask = (torch.arange(150, device=DEVICE) <= held).expand(2, 1, 1, 150)
        caches = [(keys.clone(), values.clone()) for _ in range(2)]
        norms = HeadNorms(*weights, 1e-3, kind)
        found = rotated_attention(q, k, *new, *caches[0], held_of, mask, 0.3, norms)
        normed = (rms_norm(one, weight, 1e-3, kind) for one, weight in zip((q, k), weights, strict=True))
        expected = in_two_launches(*normed, *new, *caches[1], held_of, mask, 0.3)
        assert found.isfinite().all()
        for one, other in zip((expected, *caches[1]), (found, *caches[0]), strict=True):
            assert_equal(one.view(torch.int16), other.view(torch.int16))


def test_a_new_token_that_is_not_seen_does_not_count(shares):
    given = list(rotated_inputs(4, 2, 200, 32, 32, 130, torch.float16))
    mask = torch.arange(200, device=DEVICE).expand(2, 1, 1, 200) < 130
    expected = rotated_attention(*given, mask, 0.3)
    assert expected.isfinite().all()
    for number in (1, 2):
        given[number] = torch.full_like(given[number], math.nan)
    assert_equal(rotated_attention(*given, mask, 0.3), expected)


def test_a_token_without_room_is_not_written_and_has_no_numbers(shares):
    for held in (64, 65, 1 << 40):
        given = rotated_inputs(4, 2, 64, 32, 32, 64, torch.float16)
        *new, keys, values, held_of = given
        before = keys.clone(), values.clone()
        found = rotated_attention(*new, keys, values, torch.full_like(held_of, held), None, 0.3)
        assert found.isnan().all()
        assert_equal(keys, before[0])
        assert_equal(values, before[1])


def test_strided_inputs_and_a_part_of_a_cache(poisoned, shares):
    query, key, value = inputs(4, 2, 96, 32, 32)
    expected = decode_attention(query, key, value, None, 1.0)
    wide = torch.full((2, 300, 2, 32), math.nan, device=DEVICE, dtype=key.dtype)
    wide[:, :96] = key.transpose(1, 2)
    strided = wide[:, :96].transpose(1, 2)
    assert_equal(decode_attention(query, strided, value, None, 1.0), expected)
    across = value.transpose(2, 3).contiguous().transpose(2, 3)
    assert_equal(decode_attention(query, key, across, None, 1.0), expected)


def test_masks_of_any_strides(shares):
    query, key, value = inputs(4, 2, 150, 32, 32)
    mask = torch.rand(2, 1, 1, 300, generator=torch.Generator().manual_seed(1)).to(DEVICE) < 0.5
    for strided in (mask[..., ::2], mask[..., ::2].to(torch.float16), mask[..., ::2].float()):
        expected = decode_attention(query, key, value, strided.contiguous(), 1.0)
        assert_equal(decode_attention(query, key, value, strided, 1.0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_lowest_number_in_a_mask_is_not_minus_infinity(shares, dtype):
    """It leaves no weight beside others, but where there is nothing else all keys are seen alike."""
    query, key, value = inputs(4, 2, 150, 32, 32)
    mask = torch.zeros(2, 1, 1, 150, dtype=dtype, device=DEVICE)
    mask[0], mask[1, ..., 70:] = torch.finfo(dtype).min, torch.finfo(dtype).min
    found = decode_attention(query, key, value, mask, 1.0)
    expected = slow(query, key, value, mask[1:].expand(2, 1, 1, 150), 1.0)
    expected[0] = value[0].double().mean(1).repeat_interleave(2, 0)
    if dtype == torch.float16:
        # Scores beside 65504 still count.
        expected[0] = slow(query, key, value, None, 1.0)[0]
    assert (found.double() - expected).norm() < 2e-3 * expected.norm()


def test_what_is_not_seen_is_not_read(shares):
    query, key, value = inputs(4, 2, 300, 32, 32)
    mask = torch.zeros(2, 1, 1, 300, dtype=torch.bool, device=DEVICE)
    mask[0, ..., :70], mask[1, ..., 130:190] = True, True
    expected = decode_attention(query, key, value, mask, 1.0)
    for part in (key, value):
        part.masked_fill_(~mask.transpose(2, 3), math.nan)
    assert_equal(decode_attention(query, key, value, mask, 1.0), expected)


def test_a_token_that_sees_nothing_has_zeros(shares):
    query, key, value = inputs(4, 2, 100, 32, 32)
    mask = torch.zeros(2, 1, 1, 100, dtype=torch.bool, device=DEVICE)
    mask[1] = True
    found = decode_attention(query, key, value, mask, 1.0)
    assert (found[0] == 0).all() and found[1].isfinite().all()


@pytest.mark.parametrize("part", [0, 1, 2])
def test_what_is_no_number_stays_in_its_sequence(shares, part):
    given = inputs(4, 2, 150, 32, 32)
    clean = decode_attention(*given, None, 1.0)
    given[part][1, 0, -1, 3] = math.nan
    found = decode_attention(*given, None, 1.0)
    assert_equal(found[0], clean[0])
    assert found[1, 0, 0].isnan().any()


def test_large_scores_do_not_overflow(shares):
    query, key, value = inputs(2, 1, 100, 32, 32)
    found = decode_attention(query * 1e3, key * 1e3, value, None, 1.0)
    expected = slow(query * 1e3, key * 1e3, value, None, 1.0)
    assert (found.double() - expected).norm() < LIMIT[query.dtype] * expected.norm()


@pytest.mark.parametrize(
    ("batch", "length", "number", "shares"),
    # On 132 multiprocessors, with 8 key heads of each sequence.
    [
        (1, 1, 0, 1),
        (1, 700, 0, 11),
        (1, 1 << 20, 0, 16),
        (2, 700, 0, 11),
        # 22 steps are two for eleven as for sixteen.
        (4, 700, 1, 11),
        (8, 700, 1, 8),
        (12, 700, 1, 5),
        (16, 700, 2, 1),
        (17, 700, 3, 1),
        (33, 1 << 20, 3, 1),
        (64, 700, 4, 1),
    ],
)
def test_how_keys_are_shared_out(batch, length, number, shares):
    plan, found = attention._plan(attention._Sizes(8 * batch, 4, 128, 128, 2), length, 132)
    assert (plan, found) == (PLANS[number], shares)
    assert found * plan.warps <= attention.MAX_SPLITS


def test_longer_keys_are_fewer_at_a_time_and_more_query_heads_are_other_programs():
    sizes = attention._Sizes(256, 40, 256, 64, 2)
    assert (sizes.heads, sizes.blocks) == (8, 5)
    plan, _ = attention._plan(sizes, 900, 132)
    assert (plan.warps, plan.keys) == (PLANS[-1].warps, 16)
    plan, _ = attention._plan(replace(sizes, kv_heads=8), 900, 132)
    assert (plan.warps, plan.keys) == (2, 16)
    plan, _ = attention._plan(replace(sizes, kv_heads=26), 900, 132)
    assert (plan.warps, plan.keys) == (PLANS[2].warps // 2, 16)
    sizes = attention._Sizes(256, 40, 64, 64, 2)
    assert (sizes.heads, sizes.blocks) == (16, 3)
    plan, _ = attention._plan(sizes, 900, 132)
    assert (plan.warps, plan.keys) == (PLANS[-1].warps, 16)


@pytest.mark.parametrize(
    ("batch", "heads", "length", "size", "expected"),
    # Of 132 multiprocessors, with 8 key heads of each sequence.
    [
        (1, 32, 1024, 128, True),
        # 16 programs have 64 keys each at a time.
        (1, 32, 1025, 128, False),
        (2, 32, 700, 128, True),
        (4, 32, 700, 128, False),
        # It was not measured.
        (4, 32, 200, 128, False),
        (16, 32, 4096, 128, True),
        (17, 32, 700, 128, False),
        (17, 32, 64, 128, False),
        (1, 128, 700, 128, False),
        (1, 32, 700, 256, False),
    ],
)
def test_where_attention_rotates_tokens(
    monkeypatch: pytest.MonkeyPatch, batch, heads, length, size, expected
):
    gpu = Gpu("NVIDIA H200", (9, 0), H200_PROCESSORS, HOPPER_SHARED)
    monkeypatch.setattr(attention, "gpu_of", lambda device: gpu if device.type == "cuda" else None)
    monkeypatch.setattr(attention, "device_features", lambda device: GPU_FEATURES | {"overlap"})
    query = torch.empty(batch, heads, 1, size, dtype=torch.float16, device="meta")
    key = torch.empty(batch, 8, length, size, dtype=torch.float16, device="meta")
    assert rotates(query, key, key, torch.device("cuda")) is expected
    assert not rotates(query, key, key, torch.device("cpu"))
    monkeypatch.setattr(attention, "device_features", lambda device: GPU_FEATURES - {"overlap"})
    assert not rotates(query, key, key, torch.device("cuda"))


def test_what_is_not_for_the_kernel_is_refused_with_the_reason():
    query, key, value = inputs(4, 2, 100, 32, 32)
    mask = torch.ones(2, 1, 1, 100, dtype=torch.bool)
    assert why_not(query.expand(2, 4, 3, 32), key, value, None) == "there are 3 new tokens"
    assert why_not(query, key[:, :, :0], value[:, :, :0], None) == "there are 2 sequences and 0 keys"
    assert "no multiple of 2 key heads" in str(why_not(query[:, :3], key, value, None))
    assert "the mask [2, 4, 1, 100] is not" in str(why_not(query, key, value, mask.expand(2, 4, 1, 100)))
    assert "is not [batch, 1, 1, 100]" in str(why_not(query, key, value, mask[..., :90]))
    assert "more than 256" in str(why_not(*inputs(1, 1, 5, 512, 16), None))
    # What SDPA refuses, broadcasts or sums in its own way.
    assert why_not(query, key, value, mask.long()) == "the mask is torch.int64"
    assert "other sequences" in str(why_not(query, key[:1], value[:1], mask))
    assert "other sequences" in str(why_not(query, key, value, mask[:1].expand(3, 1, 1, 100)))
    assert "of torch.float64" in str(why_not(query.double(), key.double(), value.double(), mask))
    assert "torch.float16, torch.bfloat16" in str(why_not(query, key.bfloat16(), value.bfloat16(), mask))
    assert "not all of bfloat16" in str(why_not(query.float(), key.float(), value.float(), mask))
    with forward_ad.dual_level():
        assert "tangents" in str(why_not(forward_ad.make_dual(query, query), key, value, None))
    assert "gradients" in str(why_not(query.requires_grad_(), key, value, None))


def test_it_compiles_without_a_break():
    query, key, value = inputs(4, 2, 100, 32, 32)
    compiled = torch.compile(
        lambda q: decode_attention(q * 2, key, value, None, 1.0) + 1, fullgraph=True, backend="aot_eager"
    )
    expected = decode_attention(query * 2, key, value, None, 1.0) + 1
    assert_close(compiled(query), expected)

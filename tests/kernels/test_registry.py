"""The table's choices, its refusals word by word, and the two variables."""

import logging
from dataclasses import replace

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels import registry
from quantkit.kernels.linear import linear
from quantkit.kernels.problem import Problem, device_features
from quantkit.kernels.registry import FORCE_VARIABLE, KERNELS, VERBOSE_VARIABLE, choose, explain, kernel_named
from quantkit.kernels.report import selections
from quantkit.packing.activations import activations_named
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import scheme

FAST = frozenset({"avx2", "avx512", "vnni"})


def problem(name="int4", m=1, n=2048, k=2048, dtype=torch.bfloat16, features=FAST, **options):
    return Problem(m, n, k, scheme(name, **options), dtype, "cpu", features)


@pytest.mark.parametrize(
    ("asked", "row"),
    [
        (problem(), "torch-int4"),
        (problem(zero_point="integer"), "torch-int4"),
        (problem(dtype=torch.float32), "int-digits"),
        (problem(dtype=torch.float16), "int-digits"),
        (problem(m=512), "unpack"),
        (problem("int8"), "torch-int8"),
        (problem("int8", zero_point="integer"), "unpack"),
        (problem("int8", group_size="tensor"), "torch-int8"),
        (problem("int4", group_size="tensor"), "int-digits"),
        (problem("fp6"), "int-digits"),
        (problem("fp6-e3m2"), "unpack"),
        (problem("binary"), "int-digits"),
        (problem("int3"), "int-digits"),
        (problem("ternary"), "int-digits"),
        (problem("nvfp4"), "int-digits"),
        (problem("mxfp4"), "int-digits"),
        (problem("int2", zero_point="float"), "unpack"),
        (problem("nf4"), "unpack"),
        (problem("book4"), "unpack"),
        (problem("binary-residual"), "unpack"),
        (problem("binary-rank1"), "int-digits"),
        (problem("fp8"), "unpack"),
        (problem(features=frozenset()), "unpack"),
        (problem(features=frozenset({"avx2"}), dtype=torch.float32), "unpack"),
    ],
    ids=str,
)
def test_the_first_kernel_that_runs_and_is_not_slower_is_chosen(asked, row):
    assert choose(asked).kernel.name == row


@pytest.mark.parametrize(
    ("row", "asked", "reason"),
    [
        ("torch-int4", problem("int8"), "it computes int4, the weight is int8"),
        ("torch-int4", problem(group_size="channel"), "groups of 32, 64, 128 or 256, this is channel"),
        ("torch-int4", problem(group_size="tensor"), "groups of 32, 64, 128 or 256, this is tensor"),
        ("torch-int4", problem(group_size=16), "groups of 32, 64, 128 or 256, this is 16; quantize with"),
        ("torch-int4", problem(k=2000), "K=2000 is not a multiple of 128"),
        ("torch-int4", problem(k=64), "K=64 is not a multiple of 128"),
        ("torch-int4", problem(n=40), "N in multiples of 16, this is 40"),
        (
            "torch-int4",
            problem(scale_dtype=torch.float16),
            "float16 scales are not exact in torch.bfloat16; use",
        ),
        ("torch-int4", problem(dtype=torch.float32), "slower than dense at torch.float32; use bfloat16"),
        ("torch-int4", problem(features=frozenset()), "no vector code for this CPU"),
        ("torch-int4", problem(m=33), "slower than other rows for M above 32, this is 33"),
        ("torch-int8", problem(), "it computes int8, the weight is int4"),
        ("torch-int8", problem("int8", zero_point="integer"), "no zero-points; quantize symmetrically"),
        ("torch-int8", problem("int8", group_size=64), "one scale per output channel; quantize with group"),
        ("torch-int8", problem("int8", k=2040), "wrong for K that is no multiple of 16, this is 2040"),
        (
            "torch-int8",
            problem("int8", scale_dtype=torch.float32),
            "float32 scales are not exact in torch.bfl",
        ),
        ("torch-int8", problem("int8", m=17), "slower than other rows for M above 16, this is 17"),
        ("int-digits", problem("fp6-e3m2"), "values of fp6-e3m2 are not int8 integers times a power of two"),
        (
            "int-digits",
            problem("int8", zero_point="integer"),
            "8-bit codes less a zero-point need 9 bits; quantize",
        ),
        ("int-digits", problem(group_size=99_999, k=200_000), "int32 overflows in groups of 99999; use"),
        (
            "int-digits",
            problem("int4", zero_point="float"),
            "a float zero-point makes them fractions; use an integer one",
        ),
        ("int-digits", problem("book4"), "values of codebook4 are not int8 integers times a power of two"),
        ("int-digits", problem("binary-residual"), "weights have one value each, these are sums of 2"),
        (
            "torch-int4",
            replace(problem(), scheme=replace(scheme("int4"), planes=2)),
            "weights have one value each, these are sums of 2",
        ),
        ("int-digits", problem("nf4"), "values of nf4 are not int8 integers times a power of two"),
        ("int-digits", problem(features=frozenset({"avx2"})), "no VNNI instructions"),
        ("int-digits", problem(n=64), "products of 64 x 128 weights are too small"),
        ("int-digits", problem(m=33), "slower than unpacking for M above 32 at torch.bfloat16, this is 33"),
        ("unpack", replace(problem(), device="meta"), "it runs on cpu and cuda, the tensors are on meta"),
        (
            "torch-int4",
            replace(problem(), layout=""),
            "needs the weight layout torch-int4 and none was built; call bu",
        ),
        ("torch-int4", replace(problem(), layout="int-digits"), "int-digits was built"),
    ],
)
def test_each_row_says_why_it_refuses(row, asked, reason):
    found = dict(explain(asked))[row]
    assert found is not None
    assert reason in found


def test_every_row_explains_itself():
    assert len({row.name for row in KERNELS}) == len(KERNELS)
    for row in KERNELS:
        assert row.summary
        assert kernel_named(row.name) is row


def test_something_runs_every_preset_here():
    found = selections(
        [scheme(name) for name in PRESETS], (torch.float32, torch.bfloat16, torch.float16), (1, 16, 512)
    )
    assert len(found) == 9 * len(PRESETS)
    for choice in found:
        assert choice.kernel is not None
        assert choice.kernel not in dict(choice.refusals)
        assert len(choice.refusals) < len(KERNELS)


def test_no_kernel_lists_every_reason():
    with pytest.raises(KernelError) as error:
        choose(replace(problem(), device="meta"))
    assert all(f"{row.name}: it runs on" in str(error.value) for row in KERNELS if not row.rounds_x)
    with pytest.raises(KernelError) as error:
        choose(replace(problem(), device="meta", activations=activations_named("fp8")))
    assert all(f"{row.name}: it runs on" in str(error.value) for row in KERNELS)


def test_forcing_overrides_speed_but_not_ability(monkeypatch):
    monkeypatch.setenv(FORCE_VARIABLE, "torch-int4")
    assert choose(problem(m=512, dtype=torch.float32)).kernel.name == "torch-int4"
    with pytest.raises(
        KernelError, match=r"QUANTKIT_KERNEL=torch-int4 cannot run.*N=40.*multiples of 16.*Unset"
    ):
        choose(problem(n=40))


def test_forcing_an_unknown_row_lists_the_known(monkeypatch):
    monkeypatch.setenv(FORCE_VARIABLE, "torch-int5")
    with pytest.raises(
        KernelError, match=r"unknown kernel 'torch-int5'; known are torch-int4, .*unpack.*QUANTKIT_KERNEL"
    ):
        choose(problem())


def test_verbose_says_each_choice_once(monkeypatch, caplog, make_packed):
    monkeypatch.setattr(registry, "_logged", set())
    monkeypatch.setenv(VERBOSE_VARIABLE, "1")
    packed = make_packed("fp6", (16, 64), group_size=32)
    with caplog.at_level(logging.INFO, logger="quantkit.kernels"):
        for m in (1, 3, 4, 1):
            linear(torch.ones(m, 64), packed)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, "M of 3 and 4 share a bucket"
    assert "fp6-e2m3 g32" in messages[0]
    assert ": unpack; not torch-int4: it computes int4" in messages[0]


def test_silent_unless_asked(caplog, make_packed):
    linear(torch.ones(1, 64), make_packed("int4", (16, 64), group_size=32))
    assert not caplog.records


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what a machine without a GPU says")
def test_features_of_a_gpu_that_is_not_there():
    assert device_features("cuda") <= {"triton"}


def test_gpus_of_one_machine_have_features_of_their_own(monkeypatch):
    capabilities = {0: (12, 0), 1: (8, 9), None: (12, 0)}
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda of=None: capabilities[of and of.index])
    device_features.cache_clear()
    first, second, current = (device_features(torch.device(name)) for name in ("cuda:0", "cuda:1", "cuda"))
    device_features.cache_clear()
    assert {"ptx", "overlap"} <= first and first == current
    assert "ptx" in second and "overlap" not in second

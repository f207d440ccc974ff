"""Whether Triton compiles the fastest kernels is found by compiling, and said in words where it does not."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkit.kernels import problem, triton_support
from quantkit.kernels.triton_support import TESTED_TRITON, gluon_failure, why_slow

ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)


class Probe:
    """A kernel whose compilation raises `error`, if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.compiled = error, 0

    def warmup(self, *arguments: object, **options: object) -> None:
        self.compiled += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a capability, whose Triton compiles what the probes say."""

    def pretend(capability=(9, 0), version="3.9.0", hip=None, copy=None, specialize=None):
        probes = SimpleNamespace(copy_and_multiply=copy or Probe(), specialize=specialize or Probe())
        monkeypatch.setattr(triton_support.importlib, "import_module", lambda name: probes)
        monkeypatch.setattr(triton_support, "triton_version", lambda: version)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "device", lambda device: pytest.MonkeyPatch.context())
        gluon_failure.cache_clear()
        return probes

    yield pretend
    gluon_failure.cache_clear()


def failing() -> Probe:
    error = RuntimeError("at 3:7:\n  y = f(x)\n      ^")
    error.__cause__ = AttributeError("module 'language' has no attribute 'barrier'")
    return Probe(error)


def test_nothing_is_said_where_the_kernels_compile(gpu):
    probes = gpu()
    assert why_slow(GPU) is None and why_slow(torch.device("cpu")) is None
    assert "gluon" in problem._gpu_features(GPU)
    # Once for a process.
    assert probes.copy_and_multiply.compiled == probes.specialize.compiled == 1


def test_only_hopper_needs_warp_specialization(gpu):
    gpu(capability=(8, 0), specialize=failing())
    assert why_slow(GPU) is None and "gluon" in problem._gpu_features(GPU)


@pytest.mark.parametrize("which", ["copy", "specialize"])
def test_a_triton_that_does_not_compile_them_is_named_with_the_cause_and_the_remedy(gpu, which):
    gpu(version="4.0.0", **{which: failing()})
    assert why_slow(GPU) == (
        "Triton 4.0.0 does not compile the fastest kernels (AttributeError: module 'language' has no "
        "attribute 'barrier'), so portable ones run, which take up to 4 times as long. Install a torch that "
        "brings Triton 3.6 to 3.9."
    )
    features = problem._gpu_features(GPU)
    assert "gluon" not in features and {"triton", "ptx"} <= features


def test_other_reasons_are_told_apart(gpu):
    gpu(capability=(7, 5))
    assert "need compute capability 8.0, and this GPU has 7.5" in why_slow(GPU)
    assert "gluon" not in problem._gpu_features(GPU)
    gpu(hip="7.0")
    assert "for NVIDIA GPUs" in why_slow(GPU)
    gpu(version=None)
    assert "Triton is not installed" in why_slow(GPU)


def test_the_tested_versions_are_said_alike_everywhere():
    first, last = TESTED_TRITON[0], TESTED_TRITON[-1]
    tests = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    assert any(line.startswith(f"triton>={first},") for line in tests)
    assert f"Triton {first} to {last}" in (ROOT / "docs" / "kernels.md").read_text()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_probes_compile_on_this_gpu():
    gluon_failure.cache_clear()
    assert gluon_failure(GPU) is None

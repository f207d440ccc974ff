"""Without a GPU the fused kernels run in Triton's interpreter, chosen before Triton is imported."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers are the same in every run, whatever ran before."""
    torch.manual_seed(0)

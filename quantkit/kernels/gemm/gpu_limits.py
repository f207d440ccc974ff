"""Sizes of a GPU that tiles depend on.

Rules were made on an H200 and an H100. Other GPUs scale them by their multiprocessors, within their shared
memory.
"""

import torch

from quantkit.kernels.problem import Problem, gpu_of

#: Multiprocessors of an H200.
H200_PROCESSORS = 132
#: Shared memory of a program on GPUs of compute capability 9, in bytes.
HOPPER_SHARED = 227 << 10
#: Capabilities whose GeForce products accumulate float16 twice as fast in float16 as in float32.
HALF_RATE = ((8, 6), (8, 9), (12, 0))
#: Most rows of W that leave multiprocessors of an H200 idle without split-K.
FEW_ROWS = 8192
#: Registers of a thread for codes in flight, and for accumulators, before ptxas spills.
CODE_REGISTERS, SUM_REGISTERS = 64, 128


def has_few_rows(n: int, multiprocessors: int = H200_PROCESSORS, most: int = FEW_ROWS) -> bool:
    """Return True if W has too few rows for `multiprocessors`: at most `most` rows on an H200, in proportion
    elsewhere.
    """
    return n * H200_PROCESSORS <= most * multiprocessors


def processors(problem: Problem) -> int:
    """Return the multiprocessors of the problem's GPU, or of an H200 where no GPU is given."""
    return H200_PROCESSORS if problem.gpu is None else problem.gpu.multiprocessors


def program_memory(problem: Problem) -> int:
    """Return the bytes of shared memory that a program may have on the problem's GPU, or an H200."""
    return HOPPER_SHARED if problem.gpu is None else problem.gpu.shared_memory


def multiprocessors_of(device: torch.device) -> int:
    """Return the multiprocessors of a GPU, or of an H200 where a kernel is only compiled."""
    gpu = gpu_of(device)
    return H200_PROCESSORS if gpu is None else gpu.multiprocessors


def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a GPU, or an H200."""
    gpu = gpu_of(device)
    return HOPPER_SHARED if gpu is None else gpu.shared_memory

"""Sizes of a GPU on which rules for tiles depend.

The rules were made on an H200 and an H100. On other GPUs they scale with the number of multiprocessors, and
stay within the shared memory.
"""

import torch

from quantkit.kernels.problem import Problem, gpu_of

#: Multiprocessors of an H200, for which the rules were made.
H200_PROCESSORS = 132
#: Shared memory of a program on GPUs of compute capability 9, in bytes.
HOPPER_SHARED = 227 << 10
#: Compute capabilities of GeForce GPUs, whose tensor cores sum float16 products twice as fast in float16.
HALF_RATE = ((8, 6), (8, 9), (12, 0))
#: Up to this N, multiprocessors of an H200 are idle unless tiles are split along K.
FEW_ROWS = 8192
#: Registers of a thread that codes in flight, or sums, may take before ptxas spills.
CODE_REGISTERS, SUM_REGISTERS = 64, 128


def has_few_rows(n: int, multiprocessors: int = H200_PROCESSORS, most: int = FEW_ROWS) -> bool:
    """Return True if a weight of n rows has at most `most` rows per 132 multiprocessors (an H200)."""
    return n * H200_PROCESSORS <= most * multiprocessors


def processors(problem: Problem) -> int:
    """Return the multiprocessors of the problem's GPU; those of an H200 without a GPU."""
    return H200_PROCESSORS if problem.gpu is None else problem.gpu.multiprocessors


def program_memory(problem: Problem) -> int:
    """Return the bytes of shared memory of a program on the problem's GPU; those of an H200 without a GPU."""
    return HOPPER_SHARED if problem.gpu is None else problem.gpu.shared_memory


def multiprocessors_of(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; those of an H200 for a device that is none."""
    gpu = gpu_of(device)
    return H200_PROCESSORS if gpu is None else gpu.multiprocessors


def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory of a program on a GPU; those of an H200 for a device that is none."""
    gpu = gpu_of(device)
    return HOPPER_SHARED if gpu is None else gpu.shared_memory

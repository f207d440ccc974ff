"""How large a GPU is, as far as tiles depend on it.

The rules were made on an H200 and an H100. Other GPUs have them in proportion to their multiprocessors, and
within their shared memory.
"""

import torch

from quantkit.kernels.problem import Problem, gpu_of

#: Multiprocessors of an H200, for which the rules were made.
H200_PROCESSORS = 132
#: Shared memory of a program on GPUs of compute capability 9, in bytes.
HOPPER_SHARED = 227 << 10
#: GPUs whose tensor cores, in GeForce products, sum float16 twice as fast in float16 as in float32.
HALF_RATE = ((8, 6), (8, 9), (12, 0))
#: Weights with so many rows or fewer leave processors of an H200 idle unless tiles are split by columns.
FEW_ROWS = 8192
#: Registers of a thread that codes in flight, or sums, may take before ptxas would spill.
CODE_REGISTERS, SUM_REGISTERS = 64, 128


def has_few_rows(n: int, multiprocessors: int = H200_PROCESSORS, most: int = FEW_ROWS) -> bool:
    """Whether a weight of n rows has too few for so many multiprocessors: at most so many on an H200."""
    return n * H200_PROCESSORS <= most * multiprocessors


def processors(problem: Problem) -> int:
    """Multiprocessors of the problem's GPU; those of an H200 where only the rules are asked."""
    return H200_PROCESSORS if problem.gpu is None else problem.gpu.multiprocessors


def program_memory(problem: Problem) -> int:
    """Bytes of shared memory that a program may have on the problem's GPU, likewise."""
    return HOPPER_SHARED if problem.gpu is None else problem.gpu.shared_memory


def multiprocessors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU; those of an H200 where a kernel is only compiled."""
    gpu = gpu_of(device)
    return H200_PROCESSORS if gpu is None else gpu.multiprocessors


def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on a GPU, likewise."""
    gpu = gpu_of(device)
    return HOPPER_SHARED if gpu is None else gpu.shared_memory

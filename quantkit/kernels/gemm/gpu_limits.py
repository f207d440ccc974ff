"""GPU sizes that the tile rules depend on.

The rules were made on an H200 and an H100. For other GPUs they are scaled by the number of multiprocessors,
and kept within the shared memory.
"""

import torch

from quantkit.kernels.problem import Problem, gpu_of

#: Multiprocessors of an H200, for which the rules were made.
H200_PROCESSORS = 132
#: Shared memory of a program on GPUs of compute capability 9, in bytes.
HOPPER_SHARED = 227 << 10
#: Compute capabilities of GeForce GPUs, whose tensor cores sum float16 products twice as fast in float16.
HALF_RATE = ((8, 6), (8, 9), (12, 0))
#: Largest N for which multiprocessors of an H200 idle unless tiles are split along K.
FEW_ROWS = 8192
#: Most registers of a thread for loaded codes, and for sums, before ptxas spills.
CODE_REGISTERS, SUM_REGISTERS = 64, 128


def has_few_rows(n: int, multiprocessors: int = H200_PROCESSORS, most: int = FEW_ROWS) -> bool:
    """Return True if a weight has at most `most` rows per 132 multiprocessors, the number of an H200.

    `n` is the rows of the weight, `multiprocessors` the number of the GPU that is used.
    """
    return n * H200_PROCESSORS <= most * multiprocessors


def processors(problem: Problem) -> int:
    """Return the number of multiprocessors of the problem's GPU; that of an H200 if no GPU is given."""
    return H200_PROCESSORS if problem.gpu is None else problem.gpu.multiprocessors


def program_memory(problem: Problem) -> int:
    """Return the bytes of shared memory of a program on the problem's GPU; an H200's if no GPU is given."""
    return HOPPER_SHARED if problem.gpu is None else problem.gpu.shared_memory


def multiprocessors_of(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; an H200's for other devices."""
    gpu = gpu_of(device)
    return H200_PROCESSORS if gpu is None else gpu.multiprocessors


def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may use on a GPU; an H200's for other devices."""
    gpu = gpu_of(device)
    return HOPPER_SHARED if gpu is None else gpu.shared_memory

"""The library's product of e4m3 matrices with a scale for each block, and whether a GPU has it."""

import torch

from quantkit.kernels.triton_support import WGMMA_MAJOR

#: Rows and columns of a block of W with one scale; columns of x with one scale per row.
BLOCK = 128
#: K is a multiple of it: the library wants rows of scales [N / 128, K / 128] of 16 bytes.
MULTIPLE_OF_K = 4 * BLOCK
#: Rows of x are padded to a multiple of it: the library wants as many of its codes and scales.
MULTIPLE_OF_M = 16
#: What `multiplies_blocks` found.
_found: dict[torch.device, bool] = {}


def multiplies_blocks(device: torch.device) -> bool:
    """Return True if torch multiplies e4m3 matrices with scales of 128x128 blocks on `device`, a GPU.

    torch 2.11 with CUDA 13.0 does on an H200. A small product is tried once, no version is read.
    False, and asked again next time, if the GPU has no memory for it, or a CUDA graph is being captured.
    """
    if device in _found:
        return _found[device]
    if _is_major(device) and torch.cuda.is_current_stream_capturing():
        return False
    try:
        _found[device] = _is_major(device) and _multiplies(device)
    except torch.OutOfMemoryError:
        return False
    return _found[device]


def _is_major(device: torch.device) -> bool:
    """Return True if `device` has the compute capability of cuBLAS's product."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == WGMMA_MAJOR


def _multiplies(device: torch.device) -> bool:
    """Return True if a small product runs on `device`."""
    codes = torch.zeros(BLOCK, MULTIPLE_OF_K, dtype=torch.float8_e4m3fn, device=device)
    of_x = torch.ones(MULTIPLE_OF_K // BLOCK, BLOCK, device=device)
    of_weight = torch.ones(1, MULTIPLE_OF_K // BLOCK, device=device)
    try:
        product(codes, codes, of_x, of_weight)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError):
        return False
    return True


def product(
    x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, weight_scales: torch.Tensor
) -> torch.Tensor:
    """Return y = x W^T, bfloat16 [m, n], of e4m3 matrices with a float32 scale for each block.

    x               codes [m, k]; m is a multiple of `MULTIPLE_OF_M`, k of `MULTIPLE_OF_K`
    weight          codes [n, k]; n is a multiple of 128
    x_scales        [k / 128, m], of blocks of 1 x 128
    weight_scales   [n / 128, k / 128], of blocks of 128 x 128

    Products of 128 columns are summed in the tensor cores, and multiplied and added up in float32.
    """
    return torch._scaled_mm(x, weight.t(), x_scales.t(), weight_scales.t(), out_dtype=torch.bfloat16)

"""Convert between safetensors dtype names and torch dtypes, by one table."""

import torch

from quantkit.errors import CheckpointError

# Allow-list: names from files are looked up here, never passed to getattr(torch, ...).
TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
SAFETENSORS_DTYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def torch_dtype(name: str, *, tensor: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name; raise `CheckpointError` for an unknown one."""
    try:
        return TORCH_DTYPES[name]
    except KeyError:
        raise CheckpointError(
            f"tensor {tensor!r} has dtype {name!r}; supported are {', '.join(TORCH_DTYPES)}. "
            "Convert the tensor to one of these and write the file again."
        ) from None

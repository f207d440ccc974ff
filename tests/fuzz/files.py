"""What seeds and checks share: the directory of a case, and random packed parts."""

import os
from pathlib import Path

import torch

from quantkit.packing.schemes import Scheme

from .mutate import Item, Link


def write_items(directory: Path, items: dict[str, Item]) -> None:
    """The directory of a case; names that would lead out of it are left out."""
    for name, item in items.items():
        path = directory / name
        if (
            not name
            or "\0" in name
            or "/" in name
            or name in (".", "..")
            or len(name.encode(errors="replace")) > 255
        ):
            continue
        try:
            if isinstance(item, bytes):
                path.write_bytes(item)
            elif isinstance(item, Link):
                path.symlink_to(item.target)
            elif item.kind == "fifo":
                os.mkfifo(path)
            else:
                path.mkdir()
        except UnicodeEncodeError:
            continue


def packed_parts(one: Scheme, shape: tuple[int, int], seed: int = 0) -> dict[str, torch.Tensor]:
    """Parts of random codes, with scales around one."""
    generator = torch.Generator().manual_seed(seed)
    one = one.for_columns(shape[1])
    parts = {}
    for part, (dtype, size) in one.storage_shapes(shape).items():
        if part == "packed":
            values = [c for c, v in enumerate(one.format.values) if v == v or one.is_fitted]
            codes = torch.zeros(shape, dtype=torch.uint8)
            for _ in range(one.planes):
                plane = torch.tensor(values, dtype=torch.uint8)[
                    torch.randint(len(values), shape, generator=generator)
                ]
                codes = codes << one.format.bits | plane
            parts[part] = one.pack(codes)
        elif part == "codebook":
            parts[part] = torch.linspace(-1, 1, size[0])
        elif part == "shape":
            parts[part] = torch.tensor(shape)
        elif dtype == torch.int32:
            parts[part] = torch.randint(-(2**31), 2**31, size, generator=generator).to(dtype)
        else:
            parts[part] = (torch.rand(size, generator=generator) + 0.5).to(dtype)
    return parts

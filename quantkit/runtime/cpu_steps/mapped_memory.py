"""Keep the memory of a prompt mapped while it runs, without a change to the allocator of the process.

The allocator of glibc returns free memory at the end of its heap to the system. A layer takes and frees some
MiB there, and each time the system maps and clears them again, page by page: a fifth of a prompt's time.
Memory below a block in use is not at the end of the heap.

    | in use | room, free again | pin |        nothing is returned until the pin is freed
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Bytes of a piece of the room. From 128 KiB on, the allocator may place a block outside the heap.
PIECE = 120 << 10
#: Pieces: 60 MiB, of which only what is used becomes memory.
PIECES = 512


@contextmanager
def mapped_memory() -> Iterator[None]:
    """Context manager: up to 60 MiB that are freed inside stay mapped until its end."""
    pieces = [torch.empty(PIECE, dtype=torch.uint8, device="cpu") for _ in range(PIECES + 1)]
    # The last, as the first ones fill gaps between blocks in use.
    pin = pieces.pop()
    del pieces
    try:
        yield
    finally:
        del pin

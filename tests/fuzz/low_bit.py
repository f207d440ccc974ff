"""Low-bit checkpoints of every format, with parts and configs changed."""

import json
import math
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.low_bit.weight import LowBitTensor
from quantkit.checkpoint.source import Checkpoint

from ..checkpoint.low_bit.makers import CASES, write
from .files import write_items
from .mutate import dump, mutate_directory, mutate_json, mutate_tree, pack_directory, parse, unpack_directory

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_SIZES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
_DTYPES = (*_SIZES, "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL")
#: Suffixes of parts, to rename one to.
_SUFFIXES = (
    *(
        "_scale",
        "_scale_inv",
        "_packed",
        "_shape",
        "_zero_point",
        "_g_idx",
        "_global_scale",
        "_scale_2",
        "_blocks",
    ),
    *(
        "_scales",
        ".absmax",
        ".nested_absmax",
        ".nested_quant_map",
        ".quant_state.bitsandbytes__nf4",
        ".weight",
    ),
)

#: A tensor as its file has it: name, dtype, shape, bytes.
Stored = tuple[str, str, list[int], bytes]


@cache
def low_bit_checkpoints() -> tuple[bytes, ...]:
    seeds = []
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        for i, make in enumerate(CASES.values()):
            made = make()
            directory = write(Path(place, str(i)), made.parts, made.section, dtype="float32")
            seeds.append(
                pack_directory({name: (directory / name).read_bytes() for name in (CONFIG, WEIGHTS)})
            )
    return tuple(seeds)


def mutate_low_bit(data: bytes, random: Random) -> bytes:
    """Mostly files whose header is right, so that what is read is the parts; else as any directory."""
    kind = random.randrange(8)
    if kind == 0:
        return mutate_directory(data, random)
    items = unpack_directory(data)
    config, weights = items[CONFIG], items[WEIGHTS]
    assert isinstance(config, bytes) and isinstance(weights, bytes)
    if kind == 1:
        return pack_directory({**items, CONFIG: dump(mutate_tree(parse(config), random))})
    tensors = _tensors(weights)
    for _ in range(random.choice((1, 1, 2))):
        _mutate_tensors(tensors, random)
    return pack_directory({**items, WEIGHTS: _file(tensors)})


def _tensors(data: bytes) -> list[Stored]:
    length = int.from_bytes(data[:8], "little")
    found = json.loads(data[8 : 8 + length])
    found.pop("__metadata__", None)
    return [
        (name, entry["dtype"], entry["shape"], data[8 + length :][slice(*entry["data_offsets"])])
        for name, entry in found.items()
    ]


def _file(tensors: list[Stored]) -> bytes:
    header: dict[str, Any] = {}
    payload = b""
    for name, dtype, shape, data in tensors:
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(payload), len(payload) + len(data)],
        }
        payload += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + payload


def _mutate_tensors(tensors: list[Stored], random: Random) -> None:
    at = random.randrange(len(tensors))
    name, dtype, shape, data = tensors[at]
    kind = random.randrange(9)
    if kind == 0 and len(tensors) > 1:
        del tensors[at]
    elif kind == 1:
        stem = name.rpartition("_")[0] or name
        tensors[at] = (f"{stem}{random.choice(_SUFFIXES)}", dtype, shape, data)
    elif kind == 2:
        other = random.choice(_DTYPES)
        tensors[at] = _cut(name, other, shape, data, random)
    elif kind == 3:
        shape = [random.choice((1, size, size + 1, 2 * size, max(1, size - 1), 3)) for size in shape]
        tensors[at] = _cut(name, dtype, shape, data, random)
    elif kind == 4:
        total = math.prod(shape)
        divisor = random.choice([d for d in range(1, min(total, 64) + 1) if total % d == 0])
        shape = random.choice(([divisor, total // divisor], [total], [1, total], shape[::-1], [total, 1, 1]))
        tensors[at] = (name, dtype, shape, data)
    elif kind == 5 and dtype.startswith(("F", "B")):
        odd = random.choice((b"\xff", b"\x00", b"\x7f", b"\x80", b"\x7f\x80"))
        tensors[at] = (name, dtype, shape, (odd * len(data))[: len(data)])
    elif kind == 6 and dtype == "I64":
        values = [random.choice((0, -1, 1, 2**31, 2**62, -(2**63), 96, 37)) for _ in range(len(data) // 8)]
        tensors[at] = (name, dtype, shape, b"".join(v.to_bytes(8, "little", signed=True) for v in values))
    elif name.endswith(("nf4", "fp4")) and data.startswith(b"{"):
        text = mutate_json(data, random)
        tensors[at] = (name, dtype, [max(1, len(text))], text or b" ")
    else:
        changed = bytearray(data)
        for _ in range(random.choice((1, 4, 64))):
            changed[random.randrange(len(changed))] = random.choice((0, 127, 128, 255, random.randrange(256)))
        tensors[at] = (name, dtype, shape, bytes(changed))


def _cut(name: str, dtype: str, shape: list[int], data: bytes, random: Random) -> Stored:
    """The tensor with as many bytes as dtype and shape need, random where there are none."""
    needed = math.prod(shape) * _SIZES.get(dtype, 1)
    return name, dtype, shape, (data + random.randbytes(max(0, needed - len(data))))[:needed]


def check_low_bit(case: bytes, directory: Path) -> None:
    write_items(directory, unpack_directory(case))
    checkpoint = dequantized(Checkpoint.open(directory))
    for name, tensor in checkpoint.tensors.items():
        if not isinstance(tensor, LowBitTensor):
            continue
        whole = checkpoint.read(name)
        assert (tuple(whole.shape), whole.dtype) == (tensor.shape, tensor.torch_dtype)
        rows = tensor.shape[0]
        some = checkpoint.read(name, rows // 3, rows)
        assert torch.equal(some.nan_to_num(), whole[rows // 3 :].nan_to_num())
        spec = tensor.weight.spec
        grid = tensor.weight.grid(checkpoint.read_stored, 0, spec.shape[0])
        assert int(grid.codes.max()) < 1 << spec.format.bits
        values = grid.values().to(whole.dtype)
        first = whole if spec.matrices is None else whole[0]
        assert torch.equal((first.T if spec.transposed else first).nan_to_num(), values.nan_to_num())
        # Numbers times numbers are NaN only where they overflow.
        if bool(torch.isfinite(spec.format.decode(grid.codes)).all()):
            assert not bool(values.isnan().any()) or bool(values.isinf().any())

"""The PTX of expressions, emulated: the few instructions there are, each by its definition."""

import re

import numpy as np
import torch

WORD = np.uint64(0xFFFFFFFF)


def floats(registers_: np.ndarray, ptx: str) -> list[np.ndarray]:
    """The two 16-bit floats of each register as float64, low half first."""
    halves = [(registers_ >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.uint16) for i in (0, 1)]
    if ptx == "f16x2":
        return [half.view(np.float16).astype(np.float64) for half in halves]
    return [(half.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for half in halves]


def as_register(values: list[np.ndarray], ptx: str) -> np.ndarray:
    dtype = torch.float16 if ptx == "f16x2" else torch.bfloat16
    low, high = (torch.from_numpy(v).to(dtype).view(torch.int16).numpy().view(np.uint16) for v in values)
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(16)


def run(
    asm: str, inputs: list[np.ndarray], outputs: int, ptx: str, table: np.ndarray | None = None
) -> list[np.ndarray]:
    """What the PTX of an expression computes: the few instructions there are, each by its definition.

    `table` is what the lanes of a warp hold in the operand after `inputs`.
    """
    known = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    zero = np.zeros_like(inputs[0])

    def value(token: str) -> np.ndarray:
        return known[token] if token in known else zero + np.uint64(int(token, 0))

    for line in re.split(r"[;{}]", asm):
        op, _, rest = line.strip().partition(" ")
        if not op or op == ".reg":
            continue
        to, *operands = (token.strip() for token in rest.split(","))
        if op == "shfl.sync.idx.b32":
            assert table is not None
            assert (operands[0], *operands[2:]) == (f"${outputs + len(inputs)}", "31", "0xFFFFFFFF")
            known[to] = table[known[operands[1]] & np.uint64(31)]
            continue
        a, b, c, *_ = [*map(value, operands), zero, zero]
        if op == "mov.b32":
            known[to] = a
        elif op == "shr.u32":
            known[to] = a >> b
        elif op == "shl.b32":
            known[to] = a << b & WORD
        elif op == "and.b32":
            known[to] = a & b
        elif op == "lop3.b32":
            truth = int(operands[3], 0)
            bits = [(truth >> i & 1, i) for i in range(8)]
            terms = [
                (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for on, i in bits if on
            ]
            known[to] = np.bitwise_or.reduce(terms) & WORD
        elif op == "prmt.b32":
            both = a | b << np.uint64(32)
            known[to] = zero
            for i in range(4):
                selector = c >> np.uint64(4 * i) & np.uint64(15)
                assert (selector < 8).all()
                byte = both >> selector * np.uint64(8) & np.uint64(255)
                known[to] = known[to] | byte << np.uint64(8 * i)
        else:
            assert op == f"fma.rn.{ptx}", line
            x, y, z = (floats(v, ptx) for v in (a, b, c))
            known[to] = as_register([p * q + r for p, q, r in zip(x, y, z, strict=True)], ptx)
    return [known[f"${i}"] for i in range(outputs)]


def table_size(table: str) -> int:
    """How many values the PTX of a table fetches."""
    (mask,) = re.findall(r"and\.b32 lane, lane, (\d+);", table)
    return int(mask) + 1


def held(table: str, values: np.ndarray, ptx: str) -> np.ndarray:
    """What lanes hold after the PTX of a table: twice the value of their number modulo that of the codes."""
    assert f"cvt.rn.{ptx}.f32 $0, value, value;" in table
    mine = values[np.arange(32) % table_size(table)]
    return as_register([mine, mine], ptx)

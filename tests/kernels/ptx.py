"""The PTX of expressions, emulated: the few instructions there are, each by its definition."""

import re
from collections.abc import Callable
from functools import cache, reduce

import numpy as np
import torch

from .bfloat16 import wide

WORD = np.uint64(0xFFFFFFFF)
#: Words of the variable of shared memory that PTX has, if any, and their address.
SHARED: list[np.ndarray] = []
SHARED_AT = 1024
#: What instructions of addresses compute.
COUNTED: dict[str, Callable[..., np.ndarray]] = {
    "mov.u32": lambda a, b, c: a,
    "mov.b32": lambda a, b, c: a,
    "add.u32": lambda a, b, c: a + b,
    "and.b32": lambda a, b, c: a & b,
    "shl.b32": lambda a, b, c: a << b,
    "bfe.u32": lambda a, b, c: a >> b & (1 << c) - 1,
    "mad.wide.u32": lambda a, b, c: a * b + c,
    "mad.lo.u32": lambda a, b, c: a * b + c,
    "cvt.u32.u64": lambda a, b, c: a,
    "cvt.u64.u32": lambda a, b, c: a,
}


def floats(registers_: np.ndarray | np.uint64, ptx: str) -> list[np.ndarray]:
    """The two 16-bit floats of each register as float64, low half first."""
    halves = [(registers_ >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.uint16) for i in (0, 1)]
    if ptx == "f16x2":
        return [half.view(np.float16).astype(np.float64) for half in halves]
    return [(half.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for half in halves]


def as_register(values: list[np.ndarray], ptx: str) -> np.ndarray:
    dtype = torch.float16 if ptx == "f16x2" else torch.bfloat16
    low, high = (torch.from_numpy(v).to(dtype).view(torch.int16).numpy().view(np.uint16) for v in values)
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(16)


@cache
def instructions(asm: str) -> list[list[str]]:
    """Of each its name, the register that it writes, and its operands."""
    found = [line.strip().partition(" ") for line in re.split(r"[;{}]", asm)]
    return [[op, *map(str.strip, rest.split(","))] for op, _, rest in found if op and op != ".reg"]


def run(
    asm: str, inputs: list[np.ndarray], outputs: int, ptx: str, table: np.ndarray | None = None
) -> list[np.ndarray]:
    """What the PTX of an expression computes: the few instructions there are, each by its definition.

    `table` is what the lanes of a warp hold in the operand after `inputs`, of which four are a lane's.
    """
    known = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    if table is not None:
        known[f"${outputs + len(inputs)}"] = np.resize(np.repeat(table, 4), len(inputs[0]))
    zero = np.zeros_like(inputs[0])

    def value(token: str) -> np.ndarray | np.uint64:
        return known[token] if token in known else np.uint64(int(token, 0))

    for op, to, *operands in instructions(asm):
        if op == "shfl.sync.idx.b32":
            assert table is not None
            assert (operands[0], *operands[2:]) == (f"${outputs + len(inputs)}", "31", "0xFFFFFFFF")
            known[to] = table[known[operands[1]] & np.uint64(31)]
            continue
        if op == "ld.shared.b32":
            (memory,) = SHARED
            at = known[operands[0].strip("[]")] - np.uint64(SHARED_AT)
            known[to] = memory[at // np.uint64(4)].astype(np.uint64)
            continue
        a, b, c, *_ = [*map(value, operands), zero, zero]
        if op in ("mov.b32", "mov.u32"):
            known[to] = zero + a
        elif op == "shr.u32":
            known[to] = a >> b
        elif op == "shl.b32":
            known[to] = a << b & WORD
        elif op == "shf.r.wrap.b32":
            known[to] = (b << np.uint64(32) | a) >> c & WORD
        elif op == "and.b32":
            known[to] = a & b
        elif op == "xor.b32":
            known[to] = a ^ b
        elif op == "sub.u32":
            known[to] = a - b & WORD
        elif op == "mad.lo.u32":
            known[to] = a * b + c & WORD
        elif op == "lop3.b32":
            truth = int(operands[3], 0)
            bits = [(truth >> i & 1, i) for i in range(8)]
            terms = [
                (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for on, i in bits if on
            ]
            known[to] = reduce(np.bitwise_or, terms, zero) & WORD
        elif op == "prmt.b32":
            both = a | b << np.uint64(32)
            known[to] = zero
            for i in range(4):
                selector = c >> np.uint64(4 * i) & np.uint64(15)
                assert (selector < 8).all()
                byte = both >> selector * np.uint64(8) & np.uint64(255)
                known[to] = known[to] | byte << np.uint64(8 * i)
        else:
            assert op == f"fma.rn.{ptx}", (op, to, operands)
            x, y, z = (floats(v, ptx) for v in (a, b, c))
            known[to] = as_register([p * q + r for p, q, r in zip(x, y, z, strict=True)], ptx)
    return [known[f"${i}"] for i in range(outputs)]


def multiply(asm: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """`mma.sync` with the registers [W warps, 32 lanes, 4] of its operands, of which B has two of the four.

    Lane 4 g + t has rows g and g + 8 of A and C, column g of B, and columns 2 t and 2 t + 1 of C.
    """
    shape, kinds, regs = re.fullmatch(
        r"mma\.sync\.aligned\.(\w+)\.row\.col\.([\w.]+) \{(.*)\};", " ".join(asm.split())
    ).groups()  # type: ignore[union-attr]
    to, left, right, added = (group.split(", ") for group in regs.split("}, {"))
    assert (to, left, added) == tuple([f"${first + i}" for i in range(4)] for first in (0, 4, 12))
    first = int(right[0][1:]) - 8
    assert right == [f"${8 + first}", f"${9 + first}"] and first in (0, 2)
    warps = len(a)
    if kinds == "s32.s8.s8.s32":
        assert shape == "m16n8k32"
        a, b = (np.ascontiguousarray(one).view(np.int8).astype(np.int32) for one in (a, b))
    else:
        assert shape == "m16n8k16" and kinds in ("f32.bf16.bf16.f32", "f32.f16.f16.f32")
        a, b = (np.ascontiguousarray(one).view(np.uint16) for one in (a, b))
        a, b = (wide(one) if "bf16" in kinds else one.view(np.float16).astype(np.float32) for one in (a, b))
    a = a.reshape(warps, 8, 4, 2, 2, -1).transpose(0, 4, 1, 3, 2, 5).reshape(warps, 16, -1)
    b = b.reshape(warps, 8, 4, 4, -1)[:, :, :, first : first + 2]
    b = b.transpose(0, 3, 2, 4, 1).reshape(warps, -1, 8)
    with np.errstate(invalid="ignore"):
        products = a @ b
    sums = products.reshape(warps, 2, 8, 4, 2).transpose(0, 2, 3, 1, 4).reshape(warps, 32, 4)
    return c + sums


def table_size(table: str) -> int:
    """How many values the PTX of a table fetches."""
    (mask,) = re.findall(r"and\.b32 lane, lane, (\d+);", table)
    return int(mask) + 1


def held(table: str, values: np.ndarray, ptx: str) -> np.ndarray:
    """What lanes hold after the PTX of a table: twice the value of their number modulo that of the codes."""
    assert f"cvt.rn.{ptx}.f32 $0, value, value;" in table
    mine = values[np.arange(32) % table_size(table)]
    return as_register([mine, mine], ptx)


def exchange(asm: str, words: np.ndarray) -> np.ndarray:
    """What PTX by which lanes exchange words [W warps, 32 lanes, 4] makes of them."""
    known = {f"${4 + i}": words[..., i] for i in range(4)}
    known["%laneid"] = np.broadcast_to(np.arange(32), words.shape[:2])
    for op, to, *operands in instructions(asm):
        a, b, c, *_ = [*(known[one] if one in known else int(one, 0) for one in operands), 0, 0]
        if op == "shfl.sync.bfly.b32":
            assert operands[2:] == ["31", "0xFFFFFFFF"]
            known[to] = a[:, np.arange(32) ^ b]
        elif op == "setp.ne.u32":
            known[to] = a != b
        elif op == "selp.b32":
            known[to] = np.where(c, a, b)
        else:
            known[to] = COUNTED[op](a, b, c)
    return np.stack([known[f"${i}"] for i in range(4)], axis=-1)


def of_lanes(table: str, address: int) -> np.ndarray:
    """What lanes hold after the PTX of a table in shared memory at an address."""
    known = {"%laneid": np.arange(32), "$1": np.full(32, address)}
    for op, to, *operands in instructions(table):
        if not op.startswith("."):
            a, b, c, *_ = [*(known[one] if one in known else int(one) for one in operands), 0, 0]
            known[to] = COUNTED[op](a, b, c)
    return known["$0"]


def fill(table: str, values: np.ndarray) -> int:
    """Writes a table to shared memory as PTX does, of the `values` that are at its operand: its address."""
    declared = re.match(r"\.shared \.align 128 \.b8 (\w+)\[(\d+)\];\n", table)
    assert declared is not None
    name, size = declared.groups()
    memory = np.full(int(size) // 4, WORD, dtype=np.uint64)
    SHARED[:] = [memory]
    body = table[declared.end() :]
    turns = body.count("st.shared.v4.b32")
    threads = len(memory) // 4 // turns
    nothing = np.zeros(threads, int)
    known: dict[str, np.ndarray] = {"%tid.x": np.arange(threads), name: nothing + SHARED_AT, "$1": nothing}

    def value(token: str) -> np.ndarray:
        return known[token] if token in known else np.full(threads, int(token, 0))

    # Lists of registers have commas of their own.
    for line in re.split(r";", re.sub(r"^\{|\}$", "", body)):
        op, _, rest = line.strip().partition(" ")
        if op in ("", ".reg", "bar.sync"):
            continue
        if op == "st.shared.v4.b32":
            at, stored = re.fullmatch(r"\[(\w+)\], \{(.*)\}", rest).groups()  # type: ignore[union-attr]
            for i, word in enumerate(stored.split(", ")):
                memory[(known[at] - SHARED_AT) // 4 + i] = known[word]
            continue
        to, *operands = (part.strip(" []") for part in rest.split(","))
        a, b, c, *_ = [*map(value, operands), nothing, nothing]
        if op == "ld.global.f32":
            known[to] = values[a // 4]
        elif op in ("cvt.rn.bf16x2.f32", "cvt.rn.f16x2.f32"):
            known[to] = as_register([b, a], op.split(".")[2]).astype(np.int64)
        else:
            known[to] = COUNTED[op](a, b, c)
    (address,) = set(known["$0"].tolist())
    return int(address)

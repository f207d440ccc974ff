"""Gluon kernels in Triton's interpreter, which knows neither Gluon nor PTX: warps, barriers and copies.

Tensors have no layouts here, as these say where numbers are and not what they are. The warps of a program
take turns, in an order drawn by chance, at whatever they do to barriers. What goes on at the same time on a
GPU is done as late as it may be: memory that a copy is on its way to is NaN until then, and products are
those of what is there when they are waited for. So who does not wait for something has NaN.
"""

import importlib.util
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from . import ptx
from .bfloat16 import wide

if importlib.util.find_spec("triton") is not None:
    # Here rather than where they are used, as that is a million times in a test.
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

#: How likely it is that a warp that had its turn gets another rank among those that can go on.
CHANGE = 0.125
#: NaN, which is where nobody has written; in words twice, as either of the 16-bit floats.
UNWRITTEN = {
    "fp16": np.float16(np.nan),
    "bf16": np.uint16(0x7FFF),
    "fp32": np.float32(np.nan),
    "int8": np.int8(0x7F),
    "fp8e4nv": np.uint8(0x7F),
    "int16": np.int16(0x7FFF),
    "int32": np.int32(0x7FFF7FFF),
}


class DeadlockError(AssertionError):
    """No warp can go on."""


def held() -> threading.Lock:
    """A lock that is taken by whom another thread lets go on: a semaphore is several of these, in Python."""
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class Warp:
    """A thread that runs only when it is its turn, which it may be once `ready` says so."""

    turn: threading.Lock = field(default_factory=held)
    ready: Callable[[], bool] = bool
    is_done: bool = False
    error: BaseException | None = None


class Turns:
    """The warps of a program, and the copies that are on their way."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._back = held()
        self._mine = threading.local()
        self._ranks: dict[Any, float] = {}
        self.copies: list[Callable[[], None]] = []

    def _rank(self, one: Any) -> float:
        """Who has the highest goes on, and others may fall far behind."""
        return self._ranks.setdefault(one, self._chance.random())

    def wait(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Let others have their turn, until something is so."""
        warp = getattr(self._mine, "warp", None)
        if warp is None:
            assert ready(), "what begins a program waits for nobody"
            return
        warp.ready = ready
        self._back.release()
        warp.turn.acquire()

    def run(self, bodies: list[Callable[[], None]]) -> None:
        """Run warps to their ends."""
        warps = [Warp(ready=lambda: True) for _ in bodies]
        for warp, body in zip(warps, bodies, strict=True):
            threading.Thread(target=self._run, args=(warp, body), daemon=True).start()
        while not all(warp.is_done for warp in warps):
            able: list[Any] = [warp for warp in warps if not warp.is_done and warp.ready()]
            able += self.copies
            if not able:
                raise DeadlockError(f"{sum(not warp.is_done for warp in warps)} of {len(warps)} warps wait")
            chosen = max(able, key=self._rank)
            if self._chance.random() < CHANGE:
                del self._ranks[chosen]
            if not isinstance(chosen, Warp):
                self.copies.remove(chosen)
                chosen()
                continue
            chosen.turn.release()
            self._back.acquire()
            if chosen.error is not None:
                raise chosen.error
        assert not self.copies, "shared memory is given back with copies on their way to it"

    def _run(self, warp: Warp, body: Callable[[], None]) -> None:
        self._mine.warp = warp
        warp.turn.acquire()
        try:
            body()
        except BaseException as error:
            warp.error = error
        warp.is_done = True
        self._back.release()


@dataclass
class Barrier:
    """An mbarrier: its phase ends once as many as it counts have arrived, and all bytes that they expect."""

    count: int = 0
    missing: int = 0
    bytes: int = 0
    phase: int = 0

    def change(self, arrivals: int = 0, transferred: int = 0) -> None:
        assert self.count > 0, "a barrier is used before it is initialized"
        assert arrivals <= self.missing, "more arrive at a barrier than it counts"
        self.missing -= arrivals
        self.bytes += transferred
        if self.missing == 0 and self.bytes == 0:
            self.phase, self.missing = self.phase ^ 1, self.count


class Shared:
    """Shared memory, or a part of it."""

    type = SimpleNamespace(layout=None)

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    @property
    def kind(self) -> str:
        """What Triton calls its dtype."""
        return next(kind for kind, nothing in UNWRITTEN.items() if nothing.dtype == self.data.dtype)

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    def index(self, at: Any) -> "Shared":
        return Shared(self.data[number(at)])

    def slice(self, start: Any, length: Any, dim: Any) -> "Shared":
        first = number(start)
        return Shared(np.moveaxis(np.moveaxis(self.data, dim, 0)[first : first + number(length)], 0, dim))

    def permute(self, axes: tuple[int, ...]) -> "Shared":
        return Shared(self.data.transpose(axes))

    def _keep_alive(self) -> None:
        """Memory is kept for as long as a program runs here."""

    def load(self, layout: Any) -> Any:
        names = {"fp16": tl.float16, "bf16": tl.bfloat16, "fp32": tl.float32}
        names |= {"int16": tl.int16, "int32": tl.int32}
        return tensor(self.data.copy(), names[self.kind])

    def store(self, value: Any) -> None:
        assert self.data.shape == value.handle.data.shape
        self.data[...] = value.handle.data


class Barriers:
    """What lies in shared memory instead of numbers."""

    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self._all[number(at)]


@dataclass(frozen=True)
class Products:
    """Sums that are no numbers yet: of what was there before, and products of a tensor with shared memory.

    That may be read at any time until then: what is not the same as when they were begun is NaN.
    """

    before: Any
    weights: Any
    x: Shared
    begun: np.ndarray

    def sums(self) -> Any:
        before = self.before.sums() if isinstance(self.before, Products) else self.before
        weights, x = (_numbers(data) for data in (self.weights.handle.data, self.x.data))
        if self.begun.tobytes() != self.x.data.tobytes():
            x = np.full_like(x, np.nan)
        product = weights @ x
        return tensor((before.handle.data + product).astype(before.handle.data.dtype), before.dtype)


def _numbers(data: np.ndarray) -> np.ndarray:
    """The numbers of an operand: bfloat16 and e4m3 are held as their bits."""
    if data.dtype == np.uint8:
        return torch.from_numpy(np.ascontiguousarray(data)).view(torch.float8_e4m3fn).float().numpy()
    return wide(data) if data.dtype == np.uint16 else data.astype(np.float32)


def _whole(part: Shared) -> np.ndarray:
    """The memory that it is a part of."""
    data = part.data
    while isinstance(data.base, np.ndarray):
        data = data.base
    return data


def _reinterpret(memory: Shared, dtype: Any, shape: list[int], layout: Any) -> Shared:
    # Triton 3.8 takes no other number of bits.
    return Shared(memory.data.reshape(shape))


def _barrier() -> None:
    """The threads of a group of warps are one here."""


def number(scalar: Any) -> int:
    return int(scalar.handle.data.item()) if hasattr(scalar, "handle") else int(scalar)


def tensor(data: np.ndarray, dtype: Any) -> Any:
    """A tensor of the interpreter."""
    kind = tl.block_type(dtype, list(data.shape)) if data.ndim else dtype
    return tl.tensor(TensorHandle(data, dtype), kind)


class Language:
    """`gluon.language`: where Triton's has the same function, that without the layout."""

    def __init__(self, specialize: Callable[..., None]) -> None:
        from triton.experimental.gluon import language
        from triton.experimental.gluon.language.nvidia.hopper.mbarrier import MBarrierLayout

        self.warp_specialize, self._real, self._barrier = specialize, language, MBarrierLayout

    def __getattr__(self, name: str) -> Any:
        # As Triton's are replaced while a kernel is interpreted, they are looked up each time.
        return getattr(tl if hasattr(tl, name) else self._real, name)

    def arange(self, start: int, end: int, layout: Any) -> Any:
        return self.__getattr__("arange")(start, end)

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any) -> Any:
        return self.__getattr__("full")(shape, value, dtype)

    def zeros(self, shape: Any, dtype: Any, layout: Any) -> Any:
        return self.full(shape, 0, dtype, layout)

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return value

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int
    ) -> Any:
        return inline_asm(asm, constraints, args, dtype, is_pure, pack)

    def allocate_shared_memory(self, dtype: Any, shape: list[int], layout: Any) -> Shared | Barriers:
        if isinstance(layout, self._barrier):
            return Barriers(shape[0])
        return Shared(np.full(shape, UNWRITTEN[dtype.name]))


class Gluon:
    """What a kernel imports, with the copies and barriers of one program at a time."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._turns = Turns(random.Random(seed))
        #: Copies that threads have asked for: of groups, and those that are in none yet.
        self._groups: list[list[Callable[[], None]]] = []
        self._asked: list[Callable[[], None]] = []
        #: Shared memory that threads have written, and `wgmma` does not see yet.
        self._unseen: list[weakref.ref[np.ndarray]] = []

    def modules(self) -> dict[str, Any]:
        """What takes the place of Triton's own modules."""
        import triton
        from triton.experimental.gluon.language.nvidia.hopper import mbarrier

        def jit(function: Any = None, **options: Any) -> Any:
            return jit if function is None else triton.jit(function)

        language = Language(self._specialize)
        barriers = SimpleNamespace(
            MBarrierLayout=mbarrier.MBarrierLayout,
            init=self._init,
            wait=self._wait,
            expect=self._expect,
            arrive=self._arrive,
        )
        hopper = SimpleNamespace(
            mbarrier=barriers,
            warpgroup_mma=self._multiply,
            warpgroup_mma_wait=self._wait_for_products,
            fence_async_shared=self._fence,
        )
        copies = SimpleNamespace(
            commit_group=self._commit,
            wait_group=self._wait_for_groups,
        )
        ampere = SimpleNamespace(async_copy=copies, mma_v2=self._multiply_at_once)
        experimental = ModuleType("triton.experimental")
        gluon = SimpleNamespace(jit=jit, constexpr_function=cache, language=language)
        experimental.gluon = gluon  # type: ignore[attr-defined]
        compat = SimpleNamespace(
            async_load=self._copy_by_threads,
            tma_load=self._copy,
            reinterpret=_reinterpret,
            barrier=_barrier,
            in_flight=_same,
        )
        name = "triton.experimental.gluon"
        return {
            "quantkit.kernels.gluon.compat": compat,
            "triton.experimental": experimental,
            name: gluon,
            f"{name}.language": language,
            f"{name}.language.nvidia.ampere": ampere,
            f"{name}.language.nvidia.hopper": hopper,
        }

    def _specialize(self, functions: Any, warps: Any, registers: Any) -> None:
        from triton.runtime.interpreter import interpreter_builder

        assert len(functions) == len(warps) + 1 == len(registers) + 1
        self._turns = Turns(random.Random(f"{self._seed} {interpreter_builder.grid_idx}"))
        self._turns.run([partial(function, *given) for function, given in functions])

    def _init(self, barrier: Barrier, count: int) -> None:
        assert barrier.count == 0, "a barrier is initialized twice"
        barrier.count = barrier.missing = count

    def _wait(self, barrier: Barrier, phase: Any) -> None:
        parity = number(phase)
        self._turns.wait(lambda: barrier.phase != parity)

    def _expect(self, barrier: Barrier, size: int, pred: Any = True) -> None:
        if number(pred):
            barrier.change(1, number(size))
        self._turns.wait()

    def _arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if number(pred):
            barrier.change(count)
        self._turns.wait()

    def _copy(self, descriptor: Any, at: list[Any], barrier: Barrier, to: Shared, pred: Any = True) -> None:
        """What is out of bounds is 0."""
        if not number(pred):
            return
        begins = [number(begin) for begin in at]
        assert list(to.data.shape) == descriptor.block_shape
        to.data[...] = UNWRITTEN[to.kind]

        def arrives() -> None:
            to.data[...] = 0
            sizes = zip(begins, descriptor.shape, descriptor.block_shape, strict=True)
            inside = tuple(slice(begin, min(begin + size, end)) for begin, end, size in sizes)
            found = descriptor.base[inside].contiguous().view(torch.uint8).numpy().view(to.data.dtype)
            to.data[tuple(slice(0, size) for size in found.shape)] = found
            barrier.change(transferred=-to.data.nbytes)

        self._turns.copies.append(arrives)
        self._turns.wait()

    def _copy_by_threads(self, to: Shared, at: Any, mask: Any) -> None:
        """What is masked is 0, and all of it NaN until it is waited for."""
        to.data[...] = UNWRITTEN[to.kind]

        def arrives() -> None:
            to.data[...] = tl.load(at, mask=mask, other=0).handle.data.view(to.data.dtype)
            self._unseen = [one for one in self._unseen if one() is not None] + [weakref.ref(_whole(to))]

        self._asked.append(arrives)

    def _commit(self) -> None:
        self._groups.append(self._asked)
        self._asked = []

    def _wait_for_groups(self, flying: int) -> None:
        while len(self._groups) > flying:
            for arrives in self._groups.pop(0):
                arrives()

    def _multiply_at_once(self, weights: Any, x: Any, total: Any) -> Any:
        return tl.dot(weights, x, total)

    def _fence(self) -> None:
        self._unseen = []

    def _multiply(
        self, weights: Any, x: Shared, total: Any, use_acc: bool = True, is_async: bool = False
    ) -> Products:
        assert is_async
        if not use_acc:
            total = tl.zeros_like(total)
        if any(one() is _whole(x) for one in self._unseen):
            x = Shared(np.full_like(x.data, UNWRITTEN[x.kind]))
        return Products(total, weights, x, x.data.copy())

    def _wait_for_products(self, flying: int, values: list[Any]) -> list[Any]:
        assert flying == 0
        self._turns.wait()
        return [value.sums() if isinstance(value, Products) else value for value in values]


def inline_asm(asm: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    """`tl.inline_asm_elementwise`: the PTX of expressions and their tables, and what else kernels have."""
    asm = getattr(asm, "value", asm)
    if (known := INSTRUCTIONS.get(" ".join(asm.split()))) is not None:
        return known(*args)
    if asm.startswith("mma."):
        assert pack == 4
        return tensor(ptx.multiply(asm, *(one.handle.data for one in args)), dtype)
    if "shfl.sync.bfly" in asm:
        assert pack == 4
        (words,) = (one.handle.data for one in args)
        return tensor(ptx.exchange(asm, words), dtype)
    kind = "bf16x2" if "bf16x2" in asm else "f16x2"
    if "cvt.u32.u64" in asm:
        return tensor(ptx.of_lanes(asm, number(args[0])).astype(np.uint32), dtype)
    if "%laneid" in asm:
        values = tl.load(args[0] + tl.arange(0, ptx.table_size(asm))).handle.data.astype(np.float64)
        return tensor(ptx.held(asm, values, kind).astype(np.uint32), dtype)
    if asm.startswith(".shared"):
        values = tl.load(args[0] + tl.arange(0, 16)).handle.data.astype(np.float64)
        return tensor(np.array(ptx.fill(asm, values)), dtype)
    # A table is what the 32 lanes of a warp hold; all else registers, of one number or of two.
    data = [one.handle.data for one in args]
    tables = [one.astype(np.uint64) for one in data if one.shape == (32,)]
    registers = [
        np.ascontiguousarray(one).ravel().view(np.uint32).astype(np.uint64)
        for one in np.broadcast_arrays(*(one for one in data if one.shape != (32,)))
    ]
    to = dtype if isinstance(dtype, tuple) else (dtype,)
    outputs = ptx.run(asm, registers, len(to), kind, *tables)
    # Scalars are the same in all of a tensor.
    shape, numbers = max((one.shape for one in data), key=len), data[0].dtype
    made = tuple(
        tensor(output.astype(np.uint32).view(numbers).reshape(shape), one)
        for output, one in zip(outputs, to, strict=True)
    )
    return made if isinstance(dtype, tuple) else made[0]


def _nothing(*args: Any) -> Any:
    return tensor(np.zeros((), np.int32), tl.int32)


def _same(value: Any) -> Any:
    return value


def _loaded(at: Any) -> Any:
    return tl.load(at)


def _halves(words: Any) -> Any:
    halves = np.ascontiguousarray(words.handle.data)[..., None].view(np.int16)
    return tensor(halves[..., 0], tl.int16), tensor(halves[..., 1], tl.int16)


def _bytes_of(words: Any) -> Any:
    """The four bytes of each of four equal words."""
    first = np.ascontiguousarray(words.handle.data[..., 0])
    return tensor(first[..., None].view(np.int8), tl.int8)


#: Inline PTX of the kernels that is no expression: what it gives for its inputs.
INSTRUCTIONS: dict[str, Callable[..., Any]] = {
    "wgmma.wait_group.sync.aligned 0;": Products.sums,
    "griddepcontrol.wait; // $0": _nothing,
    "griddepcontrol.launch_dependents; // $0": _nothing,
    "bar.warp.sync 0xffffffff; // $0": _nothing,
    "prefetch.global.L2 [$1]; mov.b32 $0, 0;": _nothing,
    "mov.b32 $0, $1;": _same,
    "mov.b32 $0, $1; // bytes": _bytes_of,
    "{wgmma.wait_group.sync.aligned 7; mov.b32 $0, $1;}": _same,
    "mov.b32 {$0, $1}, $2;": _halves,
    "ld.acquire.gpu.global.b64 $0, [$1];": _loaded,
}


def interpreted(sources: Mapping[str, Path], seed: int = 0) -> dict[str, ModuleType]:
    """Modules of Gluon kernels, by name, as the interpreter takes them; one may import those before it.

    `seed` is for the order of warps.
    """
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        for name, replacement in Gluon(seed).modules().items():
            patched.setitem(sys.modules, name, replacement)
        for name, path in sources.items():
            spec = importlib.util.spec_from_file_location(f"interpreted_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = found[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            module.range = in_tensors  # type: ignore[attr-defined]
            patched.setitem(sys.modules, name, module)
    return found


def rewritten(
    sources: Mapping[str, Path], changes: Iterable[tuple[str, str]], directory: Path
) -> dict[str, Path]:
    """Copies of modules in `directory`, by name, in which something else is said.

    What a change replaces stands in one of them.
    """
    texts = {name: path.read_text() for name, path in sources.items()}
    for old, new in changes:
        (name,) = (name for name, text in texts.items() if old in text)
        texts[name] = texts[name].replace(old, new)
    paths = {name: directory / f"{name.rpartition('.')[2]}.py" for name in texts}
    for name, path in paths.items():
        path.write_text(texts[name])
    return paths


def teach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's interpreter know inline PTX, and what `interpreted` makes of Gluon."""
    from triton.runtime import jit

    monkeypatch.setattr(tl, "inline_asm_elementwise", inline_asm)
    # What annotations may be called: it knows `tl.constexpr` only.
    normalized = jit._normalize_ty
    monkeypatch.setattr(
        jit,
        "_normalize_ty",
        lambda kind: normalized(kind.removeprefix("gl.") if isinstance(kind, str) else kind),
    )
    for name in ("gdc_wait", "gdc_launch_dependents"):
        # Kernels follow each other.
        monkeypatch.setattr(tl.extra.cuda, name, lambda: None)
    # Layouts are asked for, and given to what here has none.
    monkeypatch.setattr(tl.block_type, "layout", None, raising=False)


def in_tensors(*bounds: Any) -> Iterator[Any]:
    """`range` within a kernel, where whatever varies is a tensor."""
    from triton.runtime.interpreter import interpreter_semantic

    return (interpreter_semantic.to_tensor(i) for i in range(*map(number, bounds)))

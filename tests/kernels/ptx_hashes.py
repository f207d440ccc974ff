"""Hash the PTX of every kernel × format, without a GPU, to show that a move or a rename changes no code.

    python -m tests.kernels.ptx_hashes write before.json --jobs 2
    python -m tests.kernels.ptx_hashes compare before.json after.json

Write the first file before the change and the second after it, on the same machine: PTX depends on the
version of Triton. Names (of kernels, parameters, registers, labels), comments and debug lines are taken out
before hashing, so that renamed functions, constexprs and files compare equal. A case that has another name
in the second file is matched by its hash. One rename does change PTX: Triton sorts the variables that both
branches of an `if` define by name, so that those that sort otherwise now are moved in another order.

Not compiled here are `read`, which measures bandwidth, the kernels of `probe.py`, and kernels for AMD.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

# Before Triton is imported; a process of pytest keeps its interpreter and its cache. PTX is compiled anew, as
# the cache does not know of all that this reads.
if __name__ in ("__main__", "__mp_main__"):
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_ALWAYS_COMPILE": "1"}

#: A name in PTX that does not continue the name of an instruction ("mov.b32").
_NAME = re.compile(r"(?<![\w.$%])[%$A-Za-z_][\w$]*")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
#: What says where code comes from, not what it does.
_DEBUG = re.compile(r"^\s*\.(?:loc|file)\b[^\n]*$|^\s*\.section\s+\.debug_\w+\s*\{.*?^\s*\}", re.M | re.S)
#: ".reg .b32 %r<123>;", ".reg .pred p, q;"
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+([^;]+);")
#: ".visible .entry decode_gemm(", ".func (.param .b32 out) helper(", ".extern .shared .align 16 .b8 m[];"
_SYMBOL = re.compile(
    r"\.entry\s+([\w$]+)|\.func\s+(?:\([^)]*\)\s*)?([\w$]+)"
    r"|\.(?:shared|global|const|local)\s+(?:\.align\s+\d+\s+)?(?:\.(?!align)\w+\s+)+([%\w$]+)"
)
_LABEL = re.compile(r"^\s*([$\w]+):", re.MULTILINE)


def normalized(ptx: str) -> str:
    """PTX without comments, debug lines and spaces, its names numbered in the order of their first use."""
    text = _DEBUG.sub("", _COMMENT.sub("", ptx))
    # "stream_param_3": the kernel's name, and which of its parameters it is.
    text = re.sub(r"\b[\w$]+?_param_(\d+)", r"param_\1", text)
    kinds: dict[str, str] = {}
    ranges: dict[str, str] = {}
    for kind, names in _REGISTERS.findall(text):
        for name in names.split(","):
            bare, is_range, _ = name.strip().partition("<")
            (ranges if is_range else kinds)[bare] = kind
    text = _REGISTERS.sub("", text)
    for names in _SYMBOL.findall(text):
        kinds |= dict.fromkeys(filter(None, names), "symbol")
    kinds |= dict.fromkeys(_LABEL.findall(text), "label")
    numbers: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        name = match[0]
        kind = kinds.get(name) or ranges.get(name.rstrip("0123456789"))
        if kind is None:
            return name
        return numbers.setdefault(name, f"<{kind} {len(numbers)}>")

    return "\n".join(" ".join(line.split()) for line in _NAME.sub(renamed, text).splitlines() if line.strip())


def ptx_of(case: Any) -> str:
    """The PTX of a case of `codegen.py`. What ptxas makes of it is left out, which takes most of the time."""
    from triton import knobs

    from . import codegen

    class Compiled(Exception):
        pass

    def stop(backend: Any, stages: dict[str, Any], *_: Any) -> None:
        def raise_ptx(ptx: str, metadata: Any) -> None:
            raise Compiled(ptx)

        stages["cubin"] = raise_ptx

    knobs.runtime.add_stages_inspection_hook = stop
    try:
        codegen.build(codegen.Case(*case))
    except Compiled as found:
        return str(found.args[0])
    finally:
        knobs.runtime.add_stages_inspection_hook = None
    raise AssertionError(f"{case} was not compiled")


def hash_of(case: tuple[str, str, int, int]) -> str:
    """SHA-256 of what is left of the PTX, or the error with which the case does not compile."""
    try:
        return hashlib.sha256(normalized(ptx_of(case)).encode()).hexdigest()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def cases() -> list[tuple[str, str, int, int]]:
    """(kernel, preset, compute capability, M), in the words of `codegen.Case`.

    Each kernel with each preset on sm_90, its variants with a preset of each kind, and samples of all on
    sm_80 and sm_100.
    """
    from quantkit.packing.presets import PRESETS

    schemes = list(PRESETS.values())
    names = [
        name for i, (name, row) in enumerate(PRESETS.items()) if row.planes == 1 and row not in schemes[:i]
    ]
    kinds = ("int8", "int7", "int4", "binary", "fp6", "nf4", "mxfp4", "nvfp4")
    integers = {name: int(name.startswith(("int", "ternary", "binary"))) for name in names}
    found: list[tuple[str, str, int, int]] = []

    def add(kernels: dict[str, int], presets: Any, *capabilities: int) -> None:
        found.extend(
            (kernel.replace("@", str(integers.get(name, 0))), name, capability, m)
            for (kernel, m), name, capability in itertools.product(kernels.items(), presets, capabilities)
        )

    every = {
        **{"portable-gemv": 1, "predicated": 1, "portable-gemm": 64, "dequantize": 1, "repack": 1},
        **{"decode 8 2 1 2 @": 1, "decode 16 1 2 1 0": 2},
        **{"small-m 8 8 2 0": 16, "small-m 8 8 2 1": 32, "wgmma": 64},
    }
    add(every, names, 90)
    add({"portable-gemv": 1, "portable-gemm": 64, "dequantize": 1, "repack": 1}, kinds, 80, 100)
    add({"decode 8 2 1 2 @": 1, "small-m 16 1 2 0": 16}, kinds, 80, 100)
    add(
        {
            "portable-gemv": 16,
            "portable-gemv experts": 1,
            "portable-gemv long": 1,
            "portable-gemm experts": 64,
        },
        kinds,
        90,
    )
    add({"portable-gemm": 128, "fp16 sums": 64}, ("int4", "int3"), 80, 90)
    add({"unpack e4m3": 1}, ("fp8",), 90)
    streams = ("norm", "norm gate", "begin", "end gate", "long", "norm long", "begin long", "small")
    experts = ("experts", "experts gate", "experts chained")
    add({f"decode {words} 8 2 1 2 @": 1 for words in (*streams, *experts)}, ("int4", "nf4", "nvfp4"), 90)
    small_m = {f"small-m {words} 16 1 2 0": 16 for words in ("end", "gate", "gate end", "long")}
    add(small_m | {"small-m gate end 16 1 2 1": 16}, ("int4", "nf4", "nvfp4"), 90)
    add({"small-m begin 8 8 2 0": 16}, ("int4",), 80, 90, 100)
    add({f"small-m {words} 8 1 2 0": 8 for words in experts}, ("int8", "nvfp4", "nf4"), 90)
    add({"wgmma": 4096}, kinds, 90)
    add({f"wgmma {tile}": 0 for tile in ("16 128 1", "32 128 2", "64 128 1 0 256")}, ("int4", "mxfp4"), 90)
    add({f"wgmma 64 128 1 by {even}": 0 for even in (1, 2, 4)}, ("int4",), 90)
    add({"wgmma": 64}, ("int7 16 integer", "int8 32 float", "int4 16 integer"), 90)
    add({"count": 1, "sort": 1, "sort few": 1, "weigh": 1}, ("int4",), 80, 90, 100)
    ops = dict.fromkeys(("embed", "gate", "argmax partial", "argmax combine", "divergence"), 1)
    ops |= {"rounded norm": 4096}
    # Of e4m3, for linears on 9.0.
    found.extend(("ops", f"{name} codes", 90, 4096) for name in ("norm", "gate"))
    ops |= {"norm": 4096, "activate": 2880, "small_linear": 2048, "norm_linear": 2048, "route groups": 256}
    ops |= dict.fromkeys(("cos_sin", "rotate", "rotate_append", "norm_rotate_append", "append"), 128)
    ops |= dict.fromkeys(("fill", "route", "route pairs"), 128)
    ops |= dict.fromkeys(("shrink", "expand"), 4096)
    found.extend(("ops", name, capability, m) for name, m in ops.items() for capability in (80, 90, 100))
    words = ("bool new", "bool once new ready", "float new ready", "once", "bool once new norms ready")
    attends = (f"attend {plan} {kind}" for plan in ("0 12", "1 4", "2 1") for kind in words)
    found.extend((kernel, "bfloat16", cap, 128) for kernel in attends for cap in (80, 90))
    masks = ("1 bool", "4", "1 float")
    attends = (f"attend {plan} {mask}" for plan in range(5) for mask in masks)
    found.extend((kernel, "float16", 90, 256) for kernel in attends)
    return list(dict.fromkeys(found))


def write(path: Path, jobs: int, only: str) -> int:
    """Write the hash of each case whose name contains `only`; return how many do not compile."""
    wanted = [case for case in cases() if only in " | ".join(map(str, case))]
    hashes: dict[str, str] = {}
    began = time.monotonic()
    with ProcessPoolExecutor(jobs) as pool:
        running = {pool.submit(hash_of, case): " | ".join(map(str, case)) for case in wanted}
        for done, future in enumerate(as_completed(running), 1):
            hashes[running[future]] = future.result()
            if done % 25 == 0 or done == len(wanted):
                print(f"{done} of {len(wanted)}, {time.monotonic() - began:.0f} s", file=sys.stderr)
    import triton

    document = {"triton": triton.__version__, "hashes": dict(sorted(hashes.items()))}
    path.write_text(json.dumps(document, indent=1) + "\n")
    failed = {case: text for case, text in hashes.items() if not re.fullmatch("[0-9a-f]{64}", text)}
    for case, text in failed.items():
        print(f"does not compile: {case}: {text}", file=sys.stderr)
    return len(failed)


def differences(before: dict[str, str], after: dict[str, str]) -> tuple[dict[str, str], list[str]]:
    """Cases that have another name now, by their old one, and a line for each that differs or is gone."""
    new = {case: text for case, text in after.items() if case not in before}
    by_hash = defaultdict(list)
    for case, text in new.items():
        by_hash[text].append(case)
    renamed, lines = {}, []
    for case, text in before.items():
        if case in after:
            if after[case] != text:
                lines.append(f"differs: {case}")
        elif by_hash[text]:
            renamed[case] = by_hash[text].pop(0)
        else:
            lines.append(f"gone, and no new case has its code: {case}")
    lines += [f"new: {case}" for cases in by_hash.values() for case in cases]
    return renamed, lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.ptx_hashes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="compile all cases and write their hashes")
    writing.add_argument("file", type=Path)
    writing.add_argument("--jobs", type=int, default=1, help="processes")
    writing.add_argument("--only", default="", help="cases whose name contains this text")
    comparing = commands.add_parser("compare", help="list the cases that differ between two files")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "write":
        return int(write(given.file, given.jobs, given.only) > 0)
    before, after = (json.loads(path.read_text()) for path in (given.before, given.after))
    if before["triton"] != after["triton"]:
        print(f"Triton {before['triton']} wrote one file and {after['triton']} the other.", file=sys.stderr)
        return 1
    renamed, lines = differences(before["hashes"], after["hashes"])
    for old, name in renamed.items():
        print(f"renamed: {old} -> {name}")
    print("\n".join([*lines, f"{len(before['hashes'])} cases, {len(lines)} differences"]))
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())

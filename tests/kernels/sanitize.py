"""Run the tests of kernels under compute-sanitizer, on a GPU: accesses out of bounds, and races.

    python -m tests.kernels.sanitize                              memcheck, then racecheck
    python -m tests.kernels.sanitize --tools memcheck --jobs 4
    python -m tests.kernels.sanitize -k "powers_of_two and int4"  only these tests

Every kernel in every format runs, with the tiles of the tests, on odd sizes. Each allocation is one of the
driver, so that what is read beyond a tensor is not another tensor of torch's pool. Exit status 1 if a tool
found anything, a test failed, or none ran.

Racecheck reports the table in which Triton tells the warps of `wgmma_gemm` what each does: it does not
count the barrier of all warps after each write to it. Those hazards, and no others, are left out.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

#: Folders with tests of kernels that a GPU runs.
TESTS = [Path(__file__).parent / name for name in ("gemm", "layouts", "moe", "ops")]
KERNEL = Path(__file__).parents[2] / "quantkit/kernels/gemm/wgmma/wgmma_kernel.py"
#: Which tests each tool runs: all kernels in all formats, but for what captures graphs, which allocations of
#: the driver forbid. Racecheck takes several times as long, and codes of one kind are as safe as others.
TOOLS = {
    "memcheck": "(multiply_with_the_dequantized_weight and 13) or (powers_of_two and not one_expert) or "
    "dequantize_writes or builders_agree or (words_come_back and 333) or is_attention or one_expert_after or "
    "sorted_as_by_hand or added_up_in_the_order or code_books or programs_without_work or test_ops.py or "
    "test_kv_append.py or test_argmax.py",
    "racecheck": "(powers_of_two and not one_expert) or one_expert_after or sorted_as_by_hand or "
    "code_books or added_up_in_the_order or (is_attention and 200-64-64) or (builders_agree and 333) or "
    "(dequantize_writes and int4) or test_ops.py or test_kv_append.py or test_argmax.py",
}
PYTEST = (
    *(sys.executable, "-m", "pytest", "-o", "addopts=", "--import-mode=importlib", "-q"),
    *("-p", "no:xdist", "-p", "no:cacheprovider"),
)
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")
#: A hazard of racecheck, and the accesses that it names: kernel, file and line.
HAZARD = re.compile(r"Race reported between .*(?:\n=+ +and .*)*")
ACCESS = re.compile(r"access at (\w+)\+0x[0-9a-f]+ in ([\w.]+):(\d+)")
#: What the tool exits with where it found something and the program itself succeeded.
FOUND = 9


@dataclass(frozen=True)
class Part:
    """What one process found: its exit status, findings of the tool, passed tests, and all that it said."""

    status: int
    findings: int
    passed: int
    output: str


def main() -> int:
    """Parse the command line, share the tests among processes, print a line for each tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("-k", metavar="EXPRESSION", help="tests of all tools, as for pytest")
    arguments = parser.parse_args()
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not there; it comes with the CUDA toolkit", file=sys.stderr)
        return 1
    failed = False
    for tool in arguments.tools:
        tests = selected(arguments.k or TOOLS[tool])
        failed |= not tests
        shares = [tests[job :: arguments.jobs] for job in range(min(arguments.jobs, len(tests)))]
        with ThreadPoolExecutor(arguments.jobs) as pool:
            parts = list(pool.map(partial(run, tool), shares))
        passed, findings = sum(part.passed for part in parts), sum(part.findings for part in parts)
        print(f"{tool}: {passed} of {len(tests)} tests passed, {findings} findings", flush=True)
        for part in parts:
            if part.status:
                failed = True
                print(part.output[-8000:])
    return int(failed)


def selected(expression: str) -> list[str]:
    """The names of tests that `expression` selects."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-k", expression, *map(str, TESTS)],
        capture_output=True,
        text=True,
        check=False,
    )
    return [line for line in done.stdout.splitlines() if "::" in line]


def run(tool: str, tests: list[str]) -> Part:
    """Run some tests under a tool in a process of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        listed = Path(scratch) / "tests"
        listed.write_text("\n".join(tests))
        done = subprocess.run(
            [
                "compute-sanitizer",
                "--tool",
                tool,
                "--error-exitcode",
                str(FOUND),
                *PYTEST,
                "-x",
                f"@{listed}",
            ],
            env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    return judged(done.returncode, done.stdout)


def judged(status: int, output: str) -> Part:
    """What the tool said, and the tests under it: 0 and no findings where all is well."""
    passed, found = re.search(r"(\d+) passed", output), SUMMARY.search(output)
    findings = 0 if found is None else int(found[1]) - sum(map(of_triton, HAZARD.findall(output)))
    # Without a summary the tool did not run. Tests that failed have another status, from pytest.
    if found is None or passed is None:
        status = status or 1
    elif status == FOUND and findings == 0:
        status = 0
    return Part(status, findings, int(passed[1]) if passed else 0, output)


def of_triton(hazard: str) -> bool:
    """Whether all accesses of a hazard are to the table of what the warps of `wgmma_gemm` do.

    It is accessed where the kernel begins and ends, and where it tells them, by the number of their groups.
    """
    begin = ("def wgmma_gemm(", "    if BN == ", "        gl.warp_specialize(")
    lines = enumerate(KERNEL.read_text().splitlines(), 1)
    table = {str(number) for number, line in lines if line.startswith(begin)}
    accesses = ACCESS.findall(hazard)
    return bool(accesses) and all(
        kernel == "wgmma_gemm" and file == KERNEL.name and line in table for kernel, file, line in accesses
    )


if __name__ == "__main__":
    raise SystemExit(main())

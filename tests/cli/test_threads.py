"""How many threads compute, and what is said where cores are missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quantkit.cli import threads
from quantkit.cli.app import COMPUTING

from .conftest import SOURCE, Run

#: Prints the variables of a process that computes, without torch in it before.
_PROGRAM = """
import os, sys
from quantkit.cli import threads
threads.shortage = lambda count: f"{count} threads compute where"
assert "torch" not in sys.modules
threads.use_threads(3, "cpu")
import torch
print(torch.get_num_threads(), os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"])
"""


def test_threads_are_set_before_torch_is_there_and_sleep_without_cores() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "3 3 passive\n"
    assert done.stderr == "note: 3 threads compute where\n"


def test_the_variable_of_openmp_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(threads, "shortage", seen.append)
    before = torch.get_num_threads()
    for value, count in (("2", 2), ("4,2", 4)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        threads.use_threads(None, "cpu")
        assert (os.environ["OMP_NUM_THREADS"], seen.pop()) == (value, count)
    monkeypatch.delenv("OMP_NUM_THREADS")
    threads.use_threads(None, "cpu")
    assert os.environ["OMP_NUM_THREADS"] == str(threads.usable_cores())
    # torch was there before.
    assert torch.get_num_threads() == before


def test_of_processes_that_share_the_work_the_first_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threads, "shortage", lambda count: "cores are missing")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for rank, said in (("0", "note: cores are missing\n"), ("1", "")):
        monkeypatch.setenv("RANK", rank)
        threads.use_threads(None, "cpu")
        assert capsys.readouterr().err == said


def test_every_command_that_computes_has_the_option(run: Run) -> None:
    for name in COMPUTING:
        assert "--threads" in run(name, "--help").out, name
    assert "physical cores that this process may use" in " ".join(run("eval", "--help").out.split())
    done = run("generate", SOURCE, "One", "--threads", 0)
    assert done.code == 2 and "Invalid value for '--threads'" in done.err


def test_a_command_computes_with_so_many_threads(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = run("generate", SOURCE, "One", "-n", 1, "--threads", 2)
    assert (done.code, torch.get_num_threads()) == (0, 2)
    # Processes that the command starts have it too.
    assert os.environ["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("used", "count", "said"),
    [
        (0.0, 4, None),
        (0.4, 4, None),
        (
            2.9,
            4,
            "other programs use the CPU: 4 threads compute where 1 of 4 cores are free, "
            "which makes this slower; end other work or use --threads 1",
        ),
        (
            4.0,
            1,
            "other programs use the CPU: 1 thread computes where 0 of 4 cores are free, "
            "which makes this slower; end other work",
        ),
    ],
)
def test_a_shortage_is_told(
    monkeypatch: pytest.MonkeyPatch, used: float, count: int, said: str | None
) -> None:
    seen = iter([(0.0, 10.0, 1.0), (2.0, 10.0 + 2 * used + 0.5, 1.5)])
    monkeypatch.setattr(threads, "_used", lambda: next(seen))
    monkeypatch.setattr(threads, "_physical", lambda _: 4)
    monkeypatch.setattr(threads, "_cgroup_limits", lambda: iter(()))
    monkeypatch.setattr(threads.time, "sleep", lambda seconds: None)
    assert threads.shortage(count) == said


def test_what_is_used_of_cores_is_between_none_and_all() -> None:
    before = threads._used()
    threads.time.sleep(0.05)
    clock, used, own = (now - then for now, then in zip(threads._used(), before, strict=True))
    assert clock >= 0.05
    assert -0.05 <= used <= len(os.sched_getaffinity(0)) * clock + 0.05
    assert own >= 0


def test_two_hyperthreads_are_one_core(tmp_path: Path) -> None:
    for number, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        file = tmp_path / f"cpu{number}/topology/thread_siblings_list"
        file.parent.mkdir(parents=True)
        file.write_text(f"{siblings}\n")
    assert threads._physical({0, 1, 2, 3}, tmp_path) == 2
    assert threads._physical({0, 2}, tmp_path) == 1
    # One without a topology counts for itself.
    assert threads._physical({0, 9}, tmp_path) == 2


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000", "a/cpu.max": "max 100000"}, [1.5]),
        # In a container the path may be that of the host, and the group the root.
        ("0::/docker/1\n", {"cpu.max": "200000 100000"}, [2.0]),
        (
            "5:memory:/x\n4:cpu,cpuacct:/x\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "50000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            [0.5],
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),
        ("0::/\n", {}, []),
    ],
)
def test_limits_of_cgroups_are_read_in_both_versions(
    tmp_path: Path, own: str, files: dict[str, str], limits: list[float]
) -> None:
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(own)
    assert list(threads._cgroup_limits(tmp_path / "fs", tmp_path / "own")) == limits


def test_cores_are_within_the_limit_of_the_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_physical", lambda _: 8)
    for limits, cores in (([], 8), ([2.9, 4.0], 2), ([0.5], 1)):
        monkeypatch.setattr(threads, "_cgroup_limits", lambda found=limits: iter(found))
        assert threads.usable_cores() == cores

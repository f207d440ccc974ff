"""A signal ends work where that leaves nobody waiting."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quantkit.leaving import advise, advised, handle
from quantkit.signals import HeldSignals, Interrupted, advising, kept_from_children, terminate

ROOT = Path(__file__).parents[1]
EVERY = pytest.mark.parametrize(
    ("number", "ends"),
    [(signal.SIGTERM, SystemExit), (signal.SIGHUP, SystemExit), (signal.SIGINT, KeyboardInterrupt)],
)


@contextmanager
def handled(handler: object) -> Iterator[None]:
    """With this handler of SIGTERM and SIGHUP, and Python's own of SIGINT."""
    handlers = {
        signal.SIGTERM: handler,
        signal.SIGHUP: handler,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, one) for number, one in handlers.items()}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)


@EVERY
def test_a_held_signal_raises_where_it_is_asked_for_and_at_the_end(
    number: signal.Signals, ends: type[BaseException]
) -> None:
    with handled(terminate):
        held = HeldSignals()
        with pytest.raises(ends) as raised, held:
            held.check()
            signal.raise_signal(number)
            with pytest.raises(Interrupted):
                held.check()
        assert ends is KeyboardInterrupt or raised.value.code == 128 + number
        assert signal.getsignal(signal.SIGTERM) is terminate
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(ends):
            signal.raise_signal(number)


def test_work_that_is_done_before_it_asks_ends_with_the_signal_too() -> None:
    done = False
    with handled(terminate), pytest.raises(SystemExit), HeldSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        done = True
    assert done


@EVERY
def test_a_second_signal_is_not_held(number: signal.Signals, ends: type[BaseException]) -> None:
    with handled(terminate), pytest.raises(KeyboardInterrupt), HeldSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(ends):
            signal.raise_signal(number)
        raise Interrupted


def test_a_handler_of_the_caller_is_called_at_once() -> None:
    seen = []
    with handled(lambda number, _: seen.append(number)), HeldSignals() as held:
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        held.check()


def test_a_thread_that_gets_no_signals_holds_none() -> None:
    def hold() -> None:
        with HeldSignals() as held:
            found.append(signal.getsignal(signal.SIGTERM))
            held.check()

    found: list[object] = []
    with handled(terminate):
        thread = threading.Thread(target=hold)
        thread.start()
        thread.join()
    assert found == [terminate]


#: Runs the command, and sends it signals: once a module is imported, within the import, or at exit.
PROGRAM = """
import atexit, builtins, os, signal, sys, threading
number, moment = int(sys.argv.pop(1)), sys.argv.pop(1)
# The tests may run under `nohup`.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            os.kill(os.getpid(), number)

class Dropped:
    def __del__(self):
        os.kill(os.getpid(), number)

from quantkit.cli.main import main
sys.meta_path.insert(0, Finder())
if moment == "exit":
    atexit.register(lambda: (os.kill(os.getpid(), number), print("at exit")))
    from quantkit.cli import app
    app.app = lambda: sys.exit(5)
if moment == "threads":
    from quantkit.cli import app
    app.app = lambda: threading.Timer(0.1, os.kill, (os.getpid(), number)).start()
if moment == "wave":
    from quantkit.cli import app
    def work():
        import wave
        threading.Event().wait(10)
    app.app = work
if moment == "del":
    from quantkit.cli import app
    def work():
        Dropped()
        threading.Event().wait(10)
    app.app = work
main()
"""


def command_with(number: signal.Signals, moment: str, directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(int(number)), moment, "inspect", str(directory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_signal_after_the_work_changes_nothing(tmp_path: Path) -> None:
    done = command_with(signal.SIGINT, "exit", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (5, "at exit\n", "")


@pytest.mark.fault(63)
@pytest.mark.parametrize(
    ("number", "moment"),
    [
        # Within the imports of all commands, and of one that is at work.
        (signal.SIGINT, "typer"),
        (signal.SIGHUP, "quantkit.cli.commands.bench"),
        (signal.SIGINT, "wave"),
        (signal.SIGTERM, "threads"),
        (signal.SIGINT, "del"),
    ],
)
def test_a_signal_is_one_line_and_its_exit_code(number: signal.Signals, moment: str, tmp_path: Path) -> None:
    done = command_with(number, moment, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "", "interrupted\n")


def test_a_signal_that_is_to_be_ignored_stays_so() -> None:
    """As `nohup` has it of SIGHUP."""
    with handled(terminate):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        handle(signal.SIG_DFL)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_processes_that_are_started_get_no_interrupt_of_the_terminal() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('goes on')"
    with kept_from_children():
        started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert started.communicate()[0] == "goes on\n" and started.returncode == 0
    with handled(terminate), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


#: Two lines of an import, as far as `terminate` can see, that never ends.
IMPORTING = """
import os, signal, time
# Whoever started the tests may have them ignore it, as nohup does.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from quantkit import leaving, signals
leaving.advise(lambda: {advice})
signals._PATIENCE = {patience}
leaving.handle(signals.terminate)
lines = "for number in {numbers}: os.kill(os.getpid(), number)\\nwhile True: time.sleep(0.01)"
exec(compile(lines, signals._IMPORT, "exec"))
"""


@pytest.mark.parametrize(
    ("patience", "numbers", "code", "advice", "said"),
    [
        (0.1, (15,), 143, "'Continue with --resume.'", "; Continue with --resume."),
        (60, (15, 1), 129, "None", ""),
        (60, (2, 15), 143, "1 / 0", ""),
    ],
)
def test_an_import_is_not_waited_for_without_end(
    patience: float, numbers: tuple[int], code: int, advice: str, said: str
) -> None:
    """It is so for `_PATIENCE`, and until another signal comes, of whatever kind."""
    script = IMPORTING.format(patience=patience, numbers=numbers, advice=advice)
    found = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=50
    )
    assert (found.returncode, found.stderr) == (code, f"interrupted{said}\n")


def test_advice_is_that_of_the_moment_and_of_the_work_alone() -> None:
    found = ["before"]
    with advising(lambda: found[0]):
        found[0] = "now"
        assert advised() == "now"
    assert advised() is None
    with pytest.raises(SystemExit) as raised, advising(lambda: found[0]):
        raise SystemExit(143)
    # A second signal may end the process meanwhile.
    assert raised.value.__notes__ == ["now"] and advised() == "now"
    advise(None)


def test_signals_are_handled_before_anything_that_takes_long_is_imported() -> None:
    """What the console script imports, and `python -m quantkit`, before `main` handles signals."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import quantkit.__main__; print(*sys.modules)"
    done = subprocess.run(
        # Without `site`, which may import anything.
        [sys.executable, "-I", "-S", "-c", code, str(ROOT)],
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
    )
    modules = set(done.stdout.split())
    ours = {name for name in modules if name.startswith("quantkit")}
    assert ours == {"quantkit", "quantkit.__main__", "quantkit.leaving"}
    assert not modules & {"contextlib", "importlib.metadata", "json", "re", "threading", "typing", "wrapt"}

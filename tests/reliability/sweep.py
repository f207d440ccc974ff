"""Fail the n-th call of a scenario for n = 1, 2, 3, ... and judge what each failure leaves."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import QuantkitError

from .injection import Call, Fault, Injection, Point
from .scenarios import Failed, Scenario

#: The variable that names the file to which sweeps tell their figures.
FIGURES = "QUANTKIT_SWEEP_FIGURES"
#: The variable with the end of a sweep in `time.monotonic`, and why tests after it are skipped.
END, NO_TIME = "QUANTKIT_SWEEP_END", "no time left"
#: What an error says of each fault.
SAID = {
    Fault.EIO: "Input/output error",
    Fault.DEAD: "Input/output error",
    Fault.FULL: "No space left on device",
    Fault.SHORT: "No space left on device",
    Fault.MEMORY: "too little memory",
}


@dataclass
class Sweep:
    """What a sweep did: the points hit, how runs ended, and what was wrong."""

    scenario: str
    fault: Fault
    points: set[Point] = field(default_factory=set)
    runs: int = 0
    errors: int = 0
    harmless: int = 0
    violations: list[str] = field(default_factory=list)

    def tell(self) -> None:
        """Add to the figures of all sweeps."""
        counts = {"points": len(self.points), "runs": self.runs, "errors": self.errors}
        more = {"harmless": self.harmless, "violations": len(self.violations)}
        tell(f"failing calls: {self.scenario}, {self.fault.name}", **counts, **more)


def sweep(
    scenario: Scenario,
    fault: Fault,
    place: Path,
    numbers: Callable[[int], Iterable[int]] = lambda calls: range(1, calls + 1),
) -> Sweep:
    """Run `scenario` once for each of the `numbers` of a run's calls, in fresh directories in `place`.

    Afterwards it is run again as a user would, whose result must be that of a run without a fault.
    """
    expected, calls = _undisturbed(scenario, fault, place)
    done = Sweep(scenario.name, fault)
    for n in numbers(calls):
        here = _fresh(scenario, place)
        injection = Injection(scenario.roots(here), n, fault)
        problems = []
        try:
            with injection.active():
                made = scenario.run(here)
        except (Failed, QuantkitError) as error:
            done.errors += 1
            problems += _unexplained(str(error), injection.failed, fault)
        except scenario.raises as error:
            done.errors += 1
            problems += [] if SAID[fault] in str(error) else [f"raises {error!r}"]
        except Exception as error:
            problems.append(f"raises {error!r}")
        else:
            done.harmless += 1
            problems += [
                f"ends well though {call.point} failed" for call in injection.failed if _weighs(call)
            ]
            if scenario.result(here, made) != expected:
                problems.append("ends well with another result")
        if injection.hit is None:
            # Threads make their calls in an order of their own, and may join some.
            continue
        done.runs += 1
        done.points.add(injection.hit.point)
        problems += filter(None, [scenario.unsound(here, expected)])
        try:
            if scenario.result(here, scenario.rerun(here)) != expected:
                problems.append("run again it has another result")
        except Exception as error:
            problems.append(f"run again it raises {error!r}")
        done.violations += [f"{scenario.name}, {fault.name}, {injection.hit.point}: {it}" for it in problems]
    return done


def _undisturbed(scenario: Scenario, fault: Fault, place: Path) -> tuple[Any, int]:
    """The result of a run without a fault, and the number of its calls that the fault may befall."""
    here = _fresh(scenario, place)
    expected = scenario.result(here, scenario.run(here))
    here = _fresh(scenario, place)
    injection = Injection(scenario.roots(here), 0, fault)
    with injection.active():
        made = scenario.run(here)
    assert scenario.result(here, made) == expected, "two runs differ"
    assert injection.calls, "nothing to fail"
    return expected, len(injection.calls)


def _fresh(scenario: Scenario, place: Path) -> Path:
    here = place / "run"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    scenario.prepare(here)
    return here


def _weighs(call: Call) -> bool:
    """Whether a call of quantkit's own may not fail in silence, as its bytes may then not be on the disk."""
    own = " in " not in call.point.site
    return own and call.point.kind in ("create", "write", "fsync", "rename", "truncate")


def _unexplained(text: str, failed: list[Call], fault: Fault) -> list[str]:
    """What an error does not say: what happened, and to one of the files that failed or its directory."""
    problems = [] if SAID[fault] in text else [f"does not say {SAID[fault]!r}: {text}"]
    paths = [Path(call.path) for call in failed if call.path]
    names = {name for path in paths for name in (path.name.removeprefix(".tmp-"), str(path.parent))}
    if paths and not any(name in text for name in names):
        problems.append(f"names none of {sorted(names)}: {text}")
    return problems


def tell(kind: str, **figures: object) -> None:
    """Add figures of a kind, as a line of JSON, to the file that the environment names."""
    if path := os.environ.get(FIGURES):
        with Path(path).open("a") as file:
            file.write(json.dumps({"kind": kind, **figures}) + "\n")

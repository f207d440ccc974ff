"""Follow the generations of a benchmark, and estimate how long the others take."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quantkit.bench.bench_options import Grid
from quantkit.progress import Progress, duration_text

#: Most tokens of a generation that does not count.
WARM_UP = 4
#: A step of B sequences is taken to last B ** _BATCH times as long as one of 1: weights are read once.
_BATCH = 0.5


@dataclass(frozen=True)
class Times:
    """Seconds to the first token and between successive tokens, and joules used after the first token."""

    first: float
    between: list[float]
    joules: float


class Course:
    """The generations of a grid, in order: tells `progress` of each, and the time left.

    `warm_ups` has the generations by mode that do not count, where it is not 1. `estimated` is called once,
    after the first generation that counts, with the seconds that all take.
    """

    def __init__(
        self,
        grid: Grid,
        warm_ups: Mapping[str, int],
        progress: Progress | None,
        estimated: Callable[[float], None] | None,
    ) -> None:
        self._grid = grid
        self._generations = [
            warm_ups.get(mode, 1) * [min(grid.new_tokens, WARM_UP)] + grid.repeats * [grid.new_tokens]
            for _, _, mode in grid.settings
        ]
        self._progress, self._estimated = progress, estimated
        self._setting, self._done = -1, 0
        self._label = ""
        self._seconds = 0.0
        #: Seconds per token of a prompt and per step of one sequence, by mode and of the mode seen last.
        self._paces: dict[str, tuple[float, float]] = {}
        self._pace: tuple[float, float] | None = None

    def begin(self, label: str) -> None:
        """Begin the next setting of the grid, called `label`."""
        self._setting += 1
        self._done = 0
        self._label = label
        self._tell()

    def generated(self, times: Times) -> None:
        """Count a generation of the setting that began last."""
        batch, prompt, mode = self._grid.settings[self._setting]
        step = sum(times.between) / len(times.between) / batch**_BATCH
        self._pace = self._paces[mode] = times.first / (batch * prompt), step
        self._done += 1
        self._seconds += times.first + sum(times.between)
        counts = self._done > len(self._generations[self._setting]) - self._grid.repeats
        if counts and self._estimated is not None:
            self._estimated(self._seconds + self.left())
            self._estimated = None
        if self._done < len(self._generations[self._setting]):
            self._tell()

    def left(self) -> float:
        """Return about how many seconds the generations that are left take, by those that were timed last."""
        assert self._pace is not None
        seconds = 0.0
        for at, (batch, prompt, mode) in enumerate(self._grid.settings):
            if at >= self._setting:
                token, step = self._paces.get(mode, self._pace)
                for count in self._generations[at][self._done if at == self._setting else 0 :]:
                    seconds += batch * prompt * token + (count - 1) * step * batch**_BATCH
        return seconds

    def _tell(self) -> None:
        if self._progress is None:
            return
        done = sum(map(len, self._generations[: self._setting])) + self._done
        left = "" if self._pace is None else f", {duration_text(self.left())} left"
        self._progress(done, sum(map(len, self._generations)), f"{self._label}{left}")

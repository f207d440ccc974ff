"""Values of options from text: sizes, times, and lists of names and numbers."""

from operator import itemgetter

from quantkit.errors import UsageError

_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_UNITS = {unit.upper(): size for unit, size in _SIZES.items()} | {"K": 10**3, "M": 10**6, "G": 10**9}


def parse_size(text: str) -> int:
    """Bytes of a size such as `500MB` or `2GiB`; `UsageError` for anything else."""
    digits = text.strip().rstrip("BKMGIbkmgi ")
    unit = text.strip()[len(digits) :].strip().upper() or "B"
    if not digits.isascii() or not digits.isdigit() or int(digits) < 1 or unit not in _UNITS:
        raise UsageError(f"size {text!r} is not a positive number with a unit, such as 500MB or 2GB.")
    return int(digits) * _UNITS[unit]


def parse_time(text: str) -> float:
    """Seconds of a time such as `90s`, `30m` or `1.5h`; `UsageError` for anything else."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = text.strip()[:-1], text.strip()[-1:].lower()
    try:
        seconds = float(number) * units[unit]
    except (KeyError, ValueError):
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise UsageError(f"time {text!r} is not a positive number with a unit, such as 90s, 30m or 2h.")
    return seconds


def shown_size(count: int) -> str:
    """A size as `parse_size` reads it, in the largest unit that it is a whole number of."""
    unit, size = max(((unit, size) for unit, size in _SIZES.items() if count % size == 0), key=itemgetter(1))
    return f"{count // size}{unit}"


def parse_list(text: str, option: str) -> list[str]:
    """What `option` names, separated by commas, each once; `UsageError` where it names nothing."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise UsageError(f"{option} is empty; name at least one.")
    return names


def parse_rows_of_x(text: str) -> list[int]:
    """The numbers of `--m`."""
    from quantkit.kernels.tuning.tile_table import MAX_M

    numbers = [int(name[:9]) if name.isascii() and name.isdigit() else 0 for name in parse_list(text, "--m")]
    if not all(1 <= number <= MAX_M for number in numbers):
        raise UsageError(f"--m is {text!r}; it is numbers from 1 to {MAX_M}, comma-separated.")
    return numbers

"""Errors that quantkit raises for wrong input of a user or a file.

Every message names the tensor, file or option, the value found, the value expected, and the remedy.
`exit_code` is the exit code of the command line for the error.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import SequenceMatcher

from quantkit.escaping import printable
from quantkit.meant import advice_on, in_python

#: Longest message, in characters; the middle of a longer one is left out.
MAX_MESSAGE = 10_000


#: Words of other tools for a name that quantkit has; used where that name is among those that are known.
SYNONYMS = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
    "gpu": "cuda",
    "nvidia": "cuda",
    "sym": "none",
    "symmetric": "none",
    "asym": "integer",
    "asymmetric": "integer",
    "fp8": "e4m3",
    "llama.cpp": "gguf",
    "llamacpp": "gguf",
    "autogptq": "gptq",
    "gptqmodel": "gptq",
    "autoawq": "awq",
    "autoround": "signround",
    "auto-round": "signround",
    "absmax": "rtn",
    "minmax": "rtn",
    "round": "rtn",
}
#: Likeness from which two names may be one with a slip: `difflib`'s default, of 0 to 1.
_ALIKE = 0.6


@dataclass(frozen=True)
class UnknownName:
    """Name that a table does not have.

    kind, name   what it was to name, and the name
    suggestion   the sentence that says what is likely meant, or ""
    advice       the same with options of the command line in place of keyword arguments
    """

    kind: str
    name: str
    suggestion: str
    advice: str


class QuantkitError(Exception):
    """Base of all errors that are not bugs in quantkit.

    Messages quote text from files and are printed on terminals and in logs. So unprintable characters are
    escaped, and the middle is cut out of messages longer than `MAX_MESSAGE` characters.
    """

    exit_code = 1
    #: The name that no table has, if that is the error.
    unknown: UnknownName | None = None

    def __init__(self, message: str) -> None:
        if len(message) > MAX_MESSAGE:
            half = MAX_MESSAGE // 2 - 50
            left_out = len(message) - 2 * half
            message = f"{message[:half]} ... ({left_out} characters left out) ... {message[-half:]}"
        super().__init__(printable(message))


class UsageError(QuantkitError):
    """An option or argument is wrong, or options contradict each other."""

    exit_code = 2


class CheckpointError(QuantkitError):
    """A checkpoint directory or file breaks the rules of its format."""

    exit_code = 3


class BlocksError(CheckpointError):
    """The blocks of a model cannot be run one by one, or cannot replace the blocks of another model."""


class FormatError(QuantkitError):
    """Numbers, codes or packed tensors do not fit their number format or scheme."""

    exit_code = 4


class OutputError(QuantkitError):
    """The output directory cannot be written: it is occupied, locked, read-only, or the disk is full."""

    exit_code = 5


class KernelError(QuantkitError):
    """No kernel can run the problem, or a named kernel refuses it."""

    exit_code = 6


class EnvironmentProblem(QuantkitError):
    """An optional package is missing or a version is outside the supported range."""

    exit_code = 7


class OtherRankFailed(QuantkitError):
    """Another process of the same run failed and reports why; this process has nothing to add."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Context manager: begin the text of a `FormatError` with `what`, such as the name of a tensor."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error


def first_of(names: Iterable[str], most: int = 1, kind: str = "") -> str:
    """Return the first `most` of `names`, and the number of the others: "a, b and 3 more tensors".

    `kind` is the last word, for a text in which it is not clear what is named.
    """
    names = list(names)
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more {kind}".rstrip() if rest > 0 else "")


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and its causes and contexts, each once."""
    seen: list[BaseException] = []
    # Re-raised exceptions may form a circle.
    while error is not None and not any(error is one for one in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__


def closest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the one of `known` that `name` most likely is, in any case; None if several are as likely."""
    names = list(known)
    lower = name[:100].lower()
    if (meant := SYNONYMS.get(lower)) in names:
        return meant
    if not lower:
        return None
    likeness = {one: SequenceMatcher(None, one.lower(), lower).ratio() for one in names}
    best = max(likeness.values(), default=0.0)
    found = [one for one, ratio in likeness.items() if ratio == best >= _ALIKE]
    return found[0] if len(found) == 1 else None


def unknown_name(
    kind: str,
    name: str,
    known: Iterable[str],
    *,
    remedy: str = "",
    error: type[QuantkitError] = UsageError,
) -> QuantkitError:
    """Return the error for a `name` that is none of the `known` names of a `kind` of thing.

    It lists these names, then says the `remedy`, a sentence, and what is likely meant: a known name in
    another case, else what a row of `meant.MEANT` says, else a known name that looks alike.
    """
    names, given = list(known), str(name)
    in_any_case = given.lower() in map(str.lower, names)
    advice = None if in_any_case else advice_on(kind, given)
    if advice is None:
        closest = closest_name(given, names)
        advice = "" if closest is None else f"Did you mean {closest}?"
    suggestion = in_python(advice)
    text = f"unknown {kind} {name!r}; known are {', '.join(names)}."
    made = error(" ".join(filter(None, (text, remedy, suggestion))))
    made.unknown = UnknownName(kind, given, suggestion, advice)
    return made


def explained(error: QuantkitError) -> str:
    """Return the message of `error` for the command line: it advises options, not keyword arguments."""
    found = (one.unknown for one in causes(error) if isinstance(one, QuantkitError))
    unknown = next(filter(None, found), None)
    return str(error) if unknown is None else str(error).replace(unknown.suggestion, unknown.advice)

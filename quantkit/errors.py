"""The errors quantkit raises for anything a user or a file got wrong.

Every message names the tensor, file or option, what was found, what was expected, and the remedy.
`exit_code` is what the command line returns for the error.
"""

from collections.abc import Iterator

from quantkit.escaping import printable

#: Characters of a message beyond which its middle is left out.
MAX_MESSAGE = 10_000


class QuantkitError(Exception):
    """Base of all errors that are not bugs in quantkit.

    Messages quote what files say, and go to terminals and logs: what is not printable is shown as an escape,
    and of a message of more than `MAX_MESSAGE` characters the middle is left out.
    """

    exit_code = 1

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
    """The blocks of a model cannot be run one by one, or not in place of those of another."""


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
    """Another process of the same run has failed, and says why; this one has nothing to add."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error` and the exceptions that it came of, each once."""
    seen: list[BaseException] = []
    # Re-raised exceptions may form a circle.
    while error is not None and not any(error is one for one in seen):
        seen.append(error)
        yield error
        error = error.__cause__ or error.__context__

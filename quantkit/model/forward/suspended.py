"""Suspend a function in the middle and resume it there."""

import threading
from collections.abc import Callable
from typing import Any

import torch


class Abandoned(BaseException):
    """Unwinds a suspended function that will not be resumed."""


class Suspended:
    """Function in a thread of its own, which runs only while a caller waits for it in `resume`.

    The function gets this object and calls `pause` on it. It uses as many torch threads as its creator.
    """

    def __init__(self, function: "Callable[[Suspended], Any]") -> None:
        #: Result of the function, valid once `ended` is True.
        self.output: Any = None
        self.ended = False
        self._function = function
        self._value: Any = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._threads = torch.get_num_threads()
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, name="quantkit-forward", daemon=True)
        self._thread.start()

    def resume(self, value: Any = None) -> Any:
        """Run to the next pause, with `value` as the result of the current one; return the next argument.

        Returns None at the end. Raises what the function raises.
        """
        if self._abandoned:
            raise Abandoned
        self._value = value
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        found, self._value = self._value, None
        return found

    def pause(self, value: Any) -> Any:
        """Hand `value` to the caller of `resume`, wait for the next `resume`, and return its value."""
        self._value = value
        self._stopped.release()
        return self._wait()

    def abandon(self) -> None:
        """End the function where it is paused, by raising `Abandoned` there; wait for the end of its thread.

        A later `resume` raises `Abandoned` too.
        """
        self._abandoned = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> Any:
        self._go.acquire()
        if self._abandoned:
            raise Abandoned
        value, self._value = self._value, None
        return value

    def _main(self) -> None:
        try:
            if torch.get_num_threads() != self._threads:
                torch.set_num_threads(self._threads)
            self._wait()
            self.output = self._function(self)
            self.ended = True
        except BaseException as error:
            self._error = error
        self._stopped.release()

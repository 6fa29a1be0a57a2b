"""SIGINT and SIGTERM as a wish to stop, which is granted between two updates."""

from __future__ import annotations

import os
import signal
import time
from types import FrameType
from typing import Any, Self

PASSED_ON = 2.0


class Interrupts:
    """While entered, SIGINT and SIGTERM set ``wanted``; a second SIGINT interrupts at once, as ever.

    In the main thread only; elsewhere signals act as they did. Under torchrun a process gets a Ctrl-C twice, from the
    terminal and from torchrun, so a second SIGINT counts after ``PASSED_ON`` seconds.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._ignored_until = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._seen)
        except ValueError:  # not the main thread
            pass
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _seen(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() < self._ignored_until:
            return
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True
        if "TORCHELASTIC_RUN_ID" in os.environ:
            self._ignored_until = time.monotonic() + PASSED_ON
        if os.environ.get("RANK", "0") != "0":
            return
        # not print: that is not allowed to interrupt another print
        os.write(2, b"\nsaving after this step (Ctrl-C once more leaves at once)\n")

"""SIGINT and SIGTERM as a wish to stop, which is granted between two updates."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any, Self


class Interrupts:
    """While entered, SIGINT and SIGTERM set ``wanted``; a second SIGINT interrupts at once, as ever.

    In the main thread only; elsewhere signals act as they did.
    """

    def __init__(self) -> None:
        self.wanted = False
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
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True
        # not print: that is not allowed to interrupt another print
        os.write(2, b"\nsaving after this step (Ctrl-C once more leaves at once)\n")

"""A status line for humans: rewritten in place on a terminal, an occasional plain line in a log file."""

from __future__ import annotations

import math
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

LOG_INTERVAL_S = 10.0
TERMINAL_INTERVAL_S = 0.1


class StatusLine:
    """`update(text)` as often as you like; output is rate-limited. Leaving the `with` block clears the line."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._interval_s = TERMINAL_INTERVAL_S if self._is_terminal else LOG_INTERVAL_S
        self._last_time = -math.inf
        self._width = 0

    def announce(self, text: str) -> None:
        """Show `text` at once: the beginning of something that takes a while."""
        self._last_time = -math.inf
        self.update(text)

    def update(self, text: str) -> None:
        """Show `text` as the current status, unless another one is too fresh."""
        now = time.monotonic()
        if now - self._last_time < self._interval_s:
            return
        self._last_time = now
        if not self._is_terminal:
            print(f"  ... {text}", file=self._stream, flush=True)
            return
        text = text[: shutil.get_terminal_size().columns - 1]
        print(f"\r{text:<{self._width}}", end="", file=self._stream, flush=True)
        self._width = len(text)

    def update_from(self, progress: object, label: str = "") -> None:
        """Show `label` and whatever `progress` prints as."""
        self.update(f"{label}{progress}")

    def clear(self) -> None:
        """Remove the line, so that something else can be printed."""
        if self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream, flush=True)
            self._width = 0

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

"""Ctrl-C and SIGTERM: the first asks a run to save and stop, the second ends it at once."""

from __future__ import annotations

import os
import signal
from types import FrameType, TracebackType
from typing import Any, NoReturn

__all__ = ["Signals"]


class Signals:
    """A context in which SIGINT and SIGTERM are caught.

    Attributes:
        patient: whether the owner looks at `number` soon. Else, and the second time, a signal ends the process now.
        number: of the signal that came, if any.
        loud: whether to say that it was heard.
        alone: whether this is the only process. Others could not agree where to stop an evaluation.
    """

    def __init__(self, loud: bool = True, alone: bool = True) -> None:
        self.patient, self.loud, self.alone = False, loud, alone
        self.number: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._heard)
            except ValueError:  # not the main thread: whoever owns it decides
                break
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        again, self.number = self.number is not None, number
        if again or not self.patient:
            self.leave()
        if self.loud:  # print is not safe inside a signal handler
            os.write(2, b"\nsaving after this step; once more to end at once\n")

    def asked(self) -> bool:
        """Whether an evaluation is to stop."""
        return self.alone and self.number is not None

    def leave(self) -> NoReturn:
        """End as the signal wants it."""
        if self.number == signal.SIGTERM:
            raise SystemExit(128 + signal.SIGTERM)
        raise KeyboardInterrupt

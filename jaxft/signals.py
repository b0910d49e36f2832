"""Stopping a run from outside, without losing what it has done."""

import signal as signals
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

NUMBERS = (signals.SIGINT, signals.SIGTERM)


@dataclass
class StopRequest:
    """The signal that asked for a stop, once there was one."""

    signal: signals.Signals | None = None


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Within it, the first SIGINT or SIGTERM is noted; a second one acts as it always does.

    One that the process was started to ignore (a shell does that for background jobs) stays so.
    """
    request = StopRequest()
    before = {number: signals.getsignal(number) for number in NUMBERS}
    before = {number: old for number, old in before.items() if old != signals.SIG_IGN}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signals.Signals(number)
        for each, handler in before.items():
            signals.signal(each, handler)

    for number in before:
        signals.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signals.signal(number, handler)

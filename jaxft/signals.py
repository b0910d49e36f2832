"""Stopping a run from outside, without losing what it has done."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class StopRequest:
    """The signal that asked for a stop, once there was one."""

    signal: signal.Signals | None = None


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Within it, the first SIGINT or SIGTERM is noted; a second one acts as it always does."""
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

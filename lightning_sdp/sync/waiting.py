"""How long a rank waits for others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Waiting:
    """Adds up the time that a rank waits for what others send, once somebody asks for it.

    On an accelerator it is not the host that waits but the stream, so that events in the stream tell the time.

    Args:
        device: Where the messages arrive.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_wanted = False
        self._seconds = 0.0
        self._events: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Counts the duration of a block of code that does little else than wait."""
        if not self._is_wanted:
            yield
        elif self._device.type == "cpu":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
        else:
            before, after = (torch.Event(self._device, enable_timing=True) for _ in range(2))
            before.record()
            yield
            after.record()
            self._events.append((before, after))

    def seconds(self) -> float:
        """Seconds waited so far; the first call starts the count."""
        self._is_wanted = True
        for before, after in self._events:
            after.synchronize()
            self._seconds += before.elapsed_time(after) / 1000
        self._events.clear()
        return self._seconds

"""Time of the parts of something that runs on a device, each moment in one part."""

import contextlib
import time
from collections.abc import Generator
from typing import Any

import torch

__all__ = ["OTHER", "Stopwatch"]

# Between the parts.
OTHER = "other"


class Stopwatch:
    """Marks when one part ends and the next begins; a part inside a part is not counted twice.

    Args:
        device: Where the work runs. On a CPU the clock is read; elsewhere events are recorded on
            the device's current stream, and nothing waits before :meth:`seconds`.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._part = OTHER
        self._marks: list[tuple[str, Any]] = []
        self._mark(OTHER)

    @contextlib.contextmanager
    def part(self, name: str) -> Generator[None]:
        """Let what runs inside belong to a part."""
        outer = self._part
        self._mark(name)
        try:
            yield
        finally:
            self._mark(outer)

    def seconds(self) -> dict[str, float]:
        """Return the time of each part up to the last mark; waits for the device."""
        found: dict[str, float] = {}
        for (name, start), (_, stop) in zip(self._marks, self._marks[1:], strict=False):
            found[name] = found.get(name, 0.0) + self._between(start, stop)
        return found

    def _mark(self, name: str) -> None:
        self._part = name
        self._marks.append((name, self._now()))

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def _between(self, start: Any, stop: Any) -> float:
        if self._device.type == "cpu":
            return stop - start
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3

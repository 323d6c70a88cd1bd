"""How long training may take, and how far a phase of it has come."""

import time

import torch

_CHECKED_EVERY = 16  # steps between two looks at the clock: the device has to be waited for


class Budget:
    """Minutes for a whole run, counted from the making of this object; without any, steps alone decide."""

    def __init__(self, minutes: float | None) -> None:
        self._seconds = None if minutes is None else 60 * minutes
        self._began = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._began

    def until(self, mark: float) -> float | None:
        """Seconds left before the share `mark` of the run is over; None is no limit."""
        return None if self._seconds is None else max(0.0, mark * self._seconds - self.elapsed())


class Pace:
    """A phase of `steps` steps that ends sooner when `seconds` are over; at least one step is taken.

    `share` runs from 0 to 1 with the steps or, where that is further, with the time, so that a learning rate that
    follows it ends at zero either way.
    """

    def __init__(self, steps: int, seconds: float | None, device: torch.device) -> None:
        self.done, self.share = 0, 0.0
        self._steps, self._seconds, self._device = steps, seconds, device
        self._began = time.perf_counter()

    def tick(self) -> None:
        """One more step was taken."""
        self.done += 1
        if self._seconds is not None and (self.done % _CHECKED_EVERY == 0 or self._device.type != "cuda"):
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - self._began
            self.share = max(self.share, elapsed / self._seconds if self._seconds else 1.0)
        self.share = min(1.0, max(self.share, self.done / self._steps))

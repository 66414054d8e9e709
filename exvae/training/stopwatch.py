"""The time that training has taken."""

from __future__ import annotations

import time
from typing import Any


class Stopwatch:
    """Wall-clock and CPU seconds of training, summed over all sessions of a run."""

    def __init__(self, before: dict[str, Any]):
        """
        Args:
          before: metadata of the checkpoint with the seconds of earlier sessions; {} at the start.
        """
        self._wall = time.monotonic() - before.get("seconds", 0.0)
        # Old checkpoints have no CPU seconds. Then the total is unknown.
        known = "cpu_seconds" in before or not before
        self._cpu = time.process_time() - before.get("cpu_seconds", 0.0) if known else None

    def spent(self) -> dict[str, float]:
        """Return the seconds up to now, in the form that a checkpoint saves."""
        cpu = {} if self._cpu is None else {"cpu_seconds": time.process_time() - self._cpu}
        return {"seconds": time.monotonic() - self._wall, **cpu}

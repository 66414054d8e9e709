"""Progress of long work: one line that is overwritten on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time


class Progress:
    """One line that is overwritten on a terminal; in a log file a line per epoch and one a minute within long ones."""

    def __init__(self, total_steps: int, batch_size: int):
        self._total, self._batch = total_steps, batch_size
        self._terminal = sys.stdout.isatty()
        self._shown = time.monotonic()
        self._mark = (0, self._shown)

    def begin(self, step: int) -> None:
        """Before the first step of an epoch: speed is that of the steps, without validation."""
        self._mark = (step, time.monotonic())

    def rate(self, step: int) -> float:
        """Images per second in this epoch so far."""
        first, began = self._mark
        return (step - first) * self._batch / max(time.monotonic() - began, 1e-9)

    def show(self, step: int, epoch: int, elbo: float) -> None:
        """Inside an epoch."""
        now = time.monotonic()
        if now - self._shown < (0.5 if self._terminal else 60.0):
            return
        self._shown = now
        rate = self.rate(step)
        left = clock((self._total - step) * self._batch / max(rate, 1e-9))
        text = f"epoch {epoch}  step {step}  train elbo {elbo:.2f}  {rate:.0f} images/s  {left} left"
        print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", flush=True)

    def epoch(self, text: str) -> None:
        """At an epoch's end."""
        print(f"\r\x1b[K{text}" if self._terminal else text, flush=True)


class Countdown:
    """How far long work is and how long it will take, overwritten on a terminal, once a minute in a log file."""

    def __init__(self, total: int, text: str, *, quiet: bool = False):
        self._total, self._text, self._quiet = total, text, quiet
        self._terminal = sys.stdout.isatty()
        self._start = self._began = self._shown = time.monotonic()
        self._first = 0

    def show(self, done: int) -> None:
        now = time.monotonic()
        if not self._first:  # the first piece of work includes compilation and says nothing of the others
            self._first, self._began = done, now
        if now - self._shown < (0.5 if self._terminal else 60.0) or done == self._first:
            return
        self._shown = now
        rate = (done - self._first) / max(now - self._began, 1e-9)
        left = clock((self._total - done) / rate)
        self._print(f"{done} / {self._total}  {rate:.1f} images/s  {left} left", end="" if self._terminal else "\n")

    def _print(self, text: str, end: str) -> None:
        if not self._quiet:
            print(("\r\x1b[K" if self._terminal else "") + f"{self._text}  {text}", end=end, flush=True)

    def end(self) -> None:
        self._print(f"{self._total} images in {clock(time.monotonic() - self._start)}", end="\n")


def clock(seconds: float) -> str:
    """3725 -> '1h02m', 65 -> '1m05s'."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s"

"""Progress and remaining time: a bar on a terminal, lines in a log file."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 60.0  # between two lines in a log file
BAR_SECONDS = 0.5


class Progress:
    """The progress of training. A log file gets a line for each epoch, and one every minute within long epochs."""

    def __init__(self, total_steps: int, batch_size: int):
        self._total, self._batch = total_steps, batch_size
        self._bar: tqdm | None = None
        self._shown = time.monotonic()
        self._mark = (0, self._shown)

    def begin(self, step: int) -> None:
        """Call before the first step of an epoch. The speed does not include validation."""
        self._mark = (step, time.monotonic())
        if self._bar is None:
            self._bar = _bar(self._total * self._batch, step * self._batch)
        self._bar.unpause()

    def rate(self, step: int) -> float:
        """Images per second in this epoch."""
        first, began = self._mark
        return (step - first) * self._batch / max(time.monotonic() - began, 1e-9)

    def show(self, step: int, epoch: int, elbo: float) -> None:
        """Call after a step."""
        if self._bar is not None and not self._bar.disable:
            self._bar.set_description_str(f"epoch {epoch}", refresh=False)
            self._bar.set_postfix_str(f"train elbo {elbo:.2f}", refresh=False)
            self._bar.update(step * self._batch - self._bar.n)
        elif (now := time.monotonic()) - self._shown >= LINE_SECONDS:
            self._shown = now
            rate = self.rate(step)
            left = clock((self._total - step) * self._batch / max(rate, 1e-9))
            print(f"epoch {epoch}  step {step}  train elbo {elbo:.2f}  {rate:.0f} images/s  {left} left", flush=True)

    def epoch(self, text: str) -> None:
        """Print a line at the end of an epoch. The bar is hidden until the next step."""
        if self._bar is not None:
            self._bar.clear()
        print(text, flush=True)


class Countdown:
    """The progress of other work on `total` images. A log file gets a line every minute and one at the end."""

    def __init__(self, total: int, text: str, *, quiet: bool = False):
        self._total, self._text, self._quiet = total, text, quiet
        self._bar: tqdm | None = None
        self._start = self._shown = time.monotonic()
        self._mark = (0, self._start)

    def show(self, done: int) -> None:
        """Call after each batch. `done` is the number of images so far."""
        if self._quiet:
            return
        now = time.monotonic()
        if self._bar is None:  # the speed excludes the first batch, which includes compilation
            self._bar, self._mark = _bar(self._total, done, desc=self._text, smoothing=0), (done, now)
        elif not self._bar.disable:
            self._bar.update(done - self._bar.n)
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            first, began = self._mark
            rate = (done - first) / max(now - began, 1e-9)
            left = clock((self._total - done) / rate)
            print(f"{self._text}  {done} / {self._total}  {rate:.1f} images/s  {left} left", flush=True)

    def end(self) -> None:
        """Remove the bar and print the total time."""
        if self._bar is not None:
            self._bar.close()
        if not self._quiet:
            print(f"{self._text}  {self._total} images in {clock(time.monotonic() - self._start)}", flush=True)


def _bar(total: int, initial: int, **options: Any) -> tqdm:
    """Make a bar, which is disabled if standard output is not a terminal."""
    return tqdm(
        total=total,
        initial=initial,
        unit=" images",
        file=sys.stdout,
        disable=None,
        leave=False,
        position=0,
        dynamic_ncols=True,
        mininterval=BAR_SECONDS,
        miniters=1,  # otherwise a thread of tqdm redraws it, even in the middle of another line
        **options,
    )


def clock(seconds: float) -> str:
    """Format seconds: 3725 -> '1h02m', 65 -> '1m05s'."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s"

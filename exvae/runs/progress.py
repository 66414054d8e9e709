"""Progress and remaining time: a bar on a terminal, lines in a log file."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 60.0  # between two lines in a log file
BAR_SECONDS = 0.5
QUIET_SECONDS = 1.0  # a phase that is shorter says nothing
SLOW_SECONDS = 5.0  # a phase that is longer says for how long it has been running


class Progress:
    """The progress of training. A log file gets a line for each epoch, and one every minute within long epochs."""

    def __init__(self, total_steps: int, batch_size: int):
        self._total, self._batch = total_steps, batch_size
        self._bar: tqdm | None = None
        self._shown = time.monotonic()
        self._mark = (0, self._shown)

    def begin(self, step: int) -> None:
        """Call before the first step of an epoch, or after it if it had to be compiled. The speed starts here."""
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

    def pause(self) -> None:
        """Hide the bar until the next step."""
        if self._bar is not None:
            self._bar.clear()

    def epoch(self, text: str) -> None:
        """Print a line at the end of an epoch. The bar is hidden until the next step."""
        self.pause()
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


@contextlib.contextmanager
def phase(text: str) -> Iterator[None]:
    """Say what the program does in the block if it takes more than a second, for example compiling.

    After five seconds, it shows the time so far: on a terminal always, in a log file after 5, 10, 20, 40, ... seconds.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_tell, args=(text, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _tell(text: str, ended: threading.Event) -> None:
    """Print the lines of a phase until it has ended."""
    began, due = time.monotonic(), SLOW_SECONDS
    if ended.wait(QUIET_SECONDS):
        return
    is_terminal = sys.stdout.isatty()
    first, last = ("\r", "") if is_terminal else ("", "\n")  # a terminal has one line, which is written again
    print(f"{text} ...", end=last, flush=True)
    while not ended.wait(max(0.0, began + due - time.monotonic())):
        seconds = time.monotonic() - began
        due = seconds + BAR_SECONDS if is_terminal else 2 * due
        print(f"{first}{text} ... {clock(seconds)}", end=last, flush=True)
    seconds = time.monotonic() - began
    if is_terminal or seconds > SLOW_SECONDS:
        print(f"{first}{text} took {clock(seconds)}", flush=True)


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

"""Progress on a terminal and in a log file."""

import io
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
import tqdm.std

from exvae.runs import progress

ROOT = Path(__file__).parents[2]


class Clock:
    """A clock for exvae and tqdm that tests can set."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(tqdm.std, "time", lambda: self.now)


class Terminal(io.StringIO):
    """A fake terminal: `lines` returns what is visible after all output."""

    def isatty(self):
        return True

    def lines(self) -> list[str]:
        seen = []
        for row in self.getvalue().split("\n"):
            shown = ""
            for part in row.split("\r"):
                shown = part + shown[len(part) :]
            seen.append(shown.rstrip())
        return seen


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def to_terminal(monkeypatch) -> Terminal:
    """Makes standard output a terminal. Not a fixture, because pytest resets standard output before the test."""
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "stdout", Terminal())
    return sys.stdout


def train(clock, first=0, seconds=90):
    shown = progress.Progress(total_steps=1000, batch_size=10)
    clock.now += 30.0  # time before the first step
    shown.begin(first)
    for step in range(first + 1, first + seconds + 1):
        clock.now += 1.0
        shown.show(step, 1, -100.0)
    return shown


def test_log_file_has_a_line_per_epoch_and_minute_of_training(clock, capsys):
    shown = train(clock)
    assert shown.rate(90) == pytest.approx(10.0)
    shown.epoch("epoch 1 done")
    out = capsys.readouterr().out
    assert out == "epoch 1  step 30  train elbo -100.00  10 images/s  16m10s left\n" + (
        "epoch 1  step 90  train elbo -100.00  10 images/s  15m10s left\nepoch 1 done\n"
    )


def test_terminal_shows_training_as_a_bar_below_the_epochs(clock, monkeypatch):
    terminal = to_terminal(monkeypatch)
    shown = train(clock, first=410)
    [line] = terminal.lines()
    assert line.startswith("epoch 1:  50%|") and "5000/10000" in line
    assert re.search(r"\[01:30<08:(19|20), 10.00 images/s, train elbo -100.00\]$", line)
    shown.epoch("epoch 1 done")
    assert terminal.lines() == ["epoch 1 done", ""]
    print("other words")  # other output has its own line
    clock.now += 1000.0  # time between steps does not count
    shown.begin(500)
    clock.now += 1.0
    shown.show(501, 2, -99.0)
    *before, line = terminal.lines()
    assert before == ["epoch 1 done", "other words"]
    assert re.search(r"^epoch 2:  50%.*<08:(18|19), 10.00 images/s, train elbo -99.00\]$", line)
    del shown
    assert terminal.lines() == ["epoch 1 done", "other words", ""]


def count(clock, quiet=False):
    countdown = progress.Countdown(100, "log-likelihood", quiet=quiet)
    clock.now += 20.0  # the first image includes compilation
    countdown.show(1)
    for done in range(2, 62):
        clock.now += 1.0
        countdown.show(done)
    return countdown


def test_log_file_has_a_line_per_minute_of_other_work_and_a_last_line(clock, capsys):
    count(clock).end()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["log-likelihood  41 / 100  1.0 images/s  0m59s left", "log-likelihood  100 images in 1m20s"]


def test_terminal_shows_other_work_as_a_bar_and_then_a_line(clock, monkeypatch):
    terminal = to_terminal(monkeypatch)
    countdown = count(clock)
    [line] = terminal.lines()
    assert line.startswith("log-likelihood:  61%|") and line.endswith("61/100 [01:00<00:39,  1.00 images/s]")
    countdown.end()
    assert terminal.lines() == ["log-likelihood  100 images in 1m20s", ""]


def test_quiet_work_prints_nothing(clock, monkeypatch):
    terminal = to_terminal(monkeypatch)
    count(clock, quiet=True).end()
    assert terminal.getvalue() == ""


def test_work_that_ends_before_its_first_update_has_a_last_line(clock, capsys):
    progress.Countdown(3, "nothing to do").end()
    assert capsys.readouterr().out == "nothing to do  3 images in 0m00s\n"


def test_real_terminal_is_detected():
    program = (
        "from exvae.runs.progress import Progress; p = Progress(10, 5); p.begin(0); p.show(1, 1, -3.0); "
        "p.epoch('epoch 1 done'); print('end')"
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=theirs, stderr=subprocess.PIPE)
    os.close(theirs)
    _, err = process.communicate(timeout=60)
    out = os.read(ours, 10_000).decode()
    os.close(ours)
    assert err == b"" and "0/50 [00:00<?, ? images/s]" in out
    assert out.rstrip("\r").endswith("\repoch 1 done\r\nend\r\n")


@pytest.mark.parametrize(("seconds", "text"), [(5, "0m05s"), (65.9, "1m05s"), (3725, "1h02m")])
def test_clock_formats_seconds_minutes_and_hours(seconds, text):
    assert progress.clock(seconds) == text


class Block(threading.Event):
    """The end of a phase that takes `seconds` of the fake clock."""

    def __init__(self, clock, seconds: float):
        super().__init__()
        self._clock, self._end = clock, clock.now + seconds

    def wait(self, timeout: float) -> bool:
        self._clock.now = min(self._clock.now + timeout, self._end)
        return self._clock.now == self._end


@pytest.mark.parametrize(
    ("seconds", "lines"),
    [
        (0.9, []),
        (4.0, ["compiling ..."]),
        (8.0, ["compiling ...", "compiling ... 0m05s", "compiling took 0m08s"]),
        (25.0, ["compiling ...", *(f"compiling ... 0m{at}s" for at in ("05", 10, 20)), "compiling took 0m25s"]),
    ],
)
def test_log_file_has_few_lines_per_phase(clock, capsys, seconds, lines):
    progress._tell("compiling", Block(clock, seconds))
    assert capsys.readouterr().out.splitlines() == lines


def test_terminal_shows_a_phase_in_one_line(clock, monkeypatch):
    terminal = to_terminal(monkeypatch)
    progress._tell("compiling", Block(clock, 3.0))
    assert terminal.lines() == ["compiling took 0m03s", ""]
    progress._tell("compiling again", Block(clock, 25.0))
    assert terminal.lines() == ["compiling took 0m03s", "compiling again took 0m25s", ""]
    assert "\rcompiling again ... 0m24s\r" in terminal.getvalue()


def test_phase_speaks_while_the_block_runs_and_is_silent_afterwards(capsys, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.01)
    with progress.phase("encoding"):
        out = ""
        while not out:
            time.sleep(0.01)
            out = capsys.readouterr().out
    assert out == "encoding ...\n" and capsys.readouterr().out == ""


def test_phase_passes_on_errors(capsys):
    with pytest.raises(KeyError), progress.phase("encoding"):
        raise KeyError
    assert capsys.readouterr().out == ""

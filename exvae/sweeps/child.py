"""A process that ends with the one that starts it: subprocess.Popen(child.command([sys.executable, "launch.py"]))

Linux kills a process when its parent ends, however that happens, if the process itself has asked for it. Python's
subprocess can ask only in a preexec_fn, and that forks, of which JAX warns. `setpriv --pdeathsig` is not on every
system, and would miss a parent that has ended already. So this file is run by its path, asks, and becomes the command.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence


def command(words: Sequence[str], nice: int = 0, cores: Sequence[int] = ()) -> list[str]:
    """What to start, from a thread that stays: its end counts as the parent's.

    Args:
      words: the command, its program with the whole path.
      nice: taken from its priority.
      cores: those that it may use; none: all.
    """
    asked = [str(os.getpid()), str(nice), ",".join(map(str, cores))]
    return [sys.executable, "-I", os.path.abspath(__file__), *asked, *words]


def _become(parent: str, nice: str, cores: str, *words: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(parent):
            sys.exit("the process that started this one has ended")
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm says so that time is up, and the parent hears it
    os.nice(int(nice))
    if int(nice) and os.getsid(0) == os.getpid():
        # Where Linux shares the cores among sessions first, niceness counts within one, and this counts between them.
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
            file.write(nice)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    os.execv(words[0], words)


if __name__ == "__main__":
    _become(*sys.argv[1:])

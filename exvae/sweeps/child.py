"""A process that ends when its parent ends: subprocess.Popen(child.command([sys.executable, "launch.py"]))

Linux can kill a process whenever its parent ends, but the child itself must request this. With Python's subprocess
the request needs a preexec_fn, which forks, and JAX warns about forks. `setpriv --pdeathsig` is not on every system,
and it misses a parent that has already ended. So this file is run as a script: it makes the request, then becomes the
command.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence


def command(words: Sequence[str], nice: int = 0, cores: Sequence[int] = ()) -> list[str]:
    """Return the command line to start. Start it from a long-lived thread: it is also killed when the thread ends.

    Args:
      words: the command. Its program must be an absolute path.
      nice: niceness, 0 to 19.
      cores: the cores that it may use; (): all.
    """
    asked = [str(os.getpid()), str(nice), ",".join(map(str, cores))]
    return [sys.executable, "-I", os.path.abspath(__file__), *asked, *words]


def _become(parent: str, nice: str, cores: str, *words: str) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != int(parent):
            sys.exit("the process that started this one has ended")
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm sends it when time is up; the parent handles it
    os.nice(int(nice))
    if int(nice) and os.getsid(0) == os.getpid():
        # If Linux shares cores between sessions, niceness works only within a session. This sets it between sessions.
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as file:
            file.write(nice)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    os.execv(words[0], words)


if __name__ == "__main__":
    _become(*sys.argv[1:])

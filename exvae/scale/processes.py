"""Several processes that train one run together: how they meet. That they end together JAX sees to."""

from __future__ import annotations

import os
import sys
import threading

import jax

from exvae.errors import UserError

CONNECT_SECONDS = 120  # for all processes to come together
# So long after the last sign of life, of which there are two in that time, JAX takes a process for dead and aborts the
# others, which would wait for it for ever: a dead one is noticed after 5 to 10 s, and one that is stopped for as long
# counts as dead. The signs come from a thread of their own, also while a process compiles or hardly gets a core.
HEARTBEAT_SECONDS = 10


def join(coordinator: str, num_processes: int, process_id: int) -> None:
    """Become one of the processes. What is not given ('' or -1) is asked of SLURM, the TPU pod or MPI."""
    given = (bool(coordinator), num_processes >= 0, process_id >= 0)
    if any(given) and not all(given):
        raise UserError(
            "--coordinator, --num_processes and --process_id go together; without them SLURM or a pod knows"
        )
    if all(given) and not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} must lie in 0..{num_processes - 1} (--num_processes)")
    if all(given) and not coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator={coordinator} must be HOST:PORT, the same for every process")
    seconds = int(os.environ.get("EXVAE_CONNECT_SECONDS", CONNECT_SECONDS))
    where = f" through --coordinator={coordinator}" if coordinator else ""
    message = (
        f"--distributed: not all processes met{where} within {seconds} s; do all of them run, and is the port open?"
    )
    # JAX itself would give up with a crash.
    timer = threading.Timer(seconds, _end, (message, 2))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            *((coordinator, num_processes, process_id) if all(given) else (None, None, None)),
            local_device_ids=None if all(given) else _visible_devices(),
            initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"--distributed finds no SLURM job, TPU pod or MPI here ({' '.join(str(error).split())[:200]}); give "
            "--coordinator=HOST:PORT, --num_processes and --process_id"
        ) from error
    finally:
        timer.cancel()


def _visible_devices() -> list[int] | None:
    """All GPUs that SLURM has given to this process. JAX would take the one with the process's number on its node."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(len(visible.split(",")))) if visible else None


def _end(message: str, code: int) -> None:
    """At once: the main thread waits for what will not come."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)

"""Several processes that train one run together: how they find each other. JAX makes sure that they end together."""

from __future__ import annotations

import os
import sys
import threading

import jax

from exvae.errors import UserError

CONNECT_SECONDS = 120  # time for all processes to connect
# A process without a heartbeat for this time counts as dead. JAX then aborts the others, which would wait forever.
# Heartbeats are sent twice in this time: a dead process is noticed after 5 to 10 s. A process that is paused for this
# long also counts as dead. Heartbeats come from a separate thread, even while a process compiles or waits for a core.
HEARTBEAT_SECONDS = 10


def join(coordinator: str, num_processes: int, process_id: int) -> None:
    """Connect this process to the others.

    Args:
      coordinator: HOST:PORT of process 0; '': all three values come from SLURM, the TPU pod or MPI.
      num_processes: the number of processes; -1: not given.
      process_id: the number of this process, from 0; -1: not given.

    Raises:
      UserError: the values are wrong, or the processes do not find each other in time.
    """
    given = (bool(coordinator), num_processes >= 0, process_id >= 0)
    if any(given) and not all(given):
        raise UserError(
            "--coordinator, --num_processes and --process_id must be given together, or not at all in SLURM or on a pod"
        )
    if all(given) and not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} must lie in 0..{num_processes - 1} (--num_processes)")
    if all(given) and not coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator={coordinator} must be HOST:PORT, the same for every process")
    seconds = int(os.environ.get("EXVAE_CONNECT_SECONDS", CONNECT_SECONDS))
    where = f" through --coordinator={coordinator}" if coordinator else ""
    message = (
        f"--distributed: not all processes connected{where} within {seconds} s; are all running, and is the port open?"
    )
    # JAX crashes at its own timeout, so this timer ends the process before that.
    timer = threading.Timer(seconds, _end, (message, 2))
    timer.daemon = True
    timer.start()
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator if all(given) else None,
            num_processes=num_processes if all(given) else None,
            process_id=process_id if all(given) else None,
            local_device_ids=None if all(given) else _visible_devices(),
            initialization_timeout=seconds + 60,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"--distributed found no SLURM job, TPU pod or MPI here ({' '.join(str(error).split())[:200]}); give "
            "--coordinator=HOST:PORT, --num_processes and --process_id"
        ) from error
    finally:
        timer.cancel()


def _visible_devices() -> list[int] | None:
    """All GPUs that SLURM gave to this process. By default, JAX would use only one of them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(len(visible.split(",")))) if visible else None


def _end(message: str, code: int) -> None:
    """End the process at once, because the main thread is blocked."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)

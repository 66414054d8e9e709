"""Several processes that train one run together: how they meet, and how one learns that another has ended."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading

import jax
import numpy as np

from exvae.errors import UserError
from exvae.scale import sharding

CONNECT_SECONDS = 120  # for all processes to come together
HEARTBEAT_SECONDS = 60  # after so long without a sign of life JAX takes a process for dead, and ends the others
BYE = b"."

_connections: list[socket.socket] = []  # of the main process to every other one, of the others to the main one


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
    _watch()


def _visible_devices() -> list[int] | None:
    """All GPUs that SLURM has given to this process. JAX would take the one with the process's number on its node."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return list(range(len(visible.split(",")))) if visible else None


def leave() -> None:
    """This process has done its work: its end must not alarm the others."""
    for connection in _connections:
        with contextlib.suppress(OSError):
            connection.sendall(BYE)


def _watch() -> None:
    """A connection between the main process and every other one: the system closes it when a process ends, however.

    Collectives would wait for the dead until JAX misses its heartbeat, a minute later, and crashes.
    """
    address, server = "", None
    if sharding.is_main():
        server = socket.create_server(("", 0))
        address = f"{secrets.token_hex(16)}:{socket.gethostname()}:{server.getsockname()[1]}"
    letters = np.zeros(256, np.uint8)
    letters[: len(address)] = np.frombuffer(address.encode(), np.uint8)
    token, host, port = bytes(np.asarray(sharding.agree(letters))).rstrip(b"\0").decode().split(":")
    if server is not None:
        threading.Thread(target=_accept, args=(server, token.encode()), daemon=True).start()
        return
    with contextlib.suppress(OSError):  # a name or port that cannot be reached: JAX's heartbeat is left
        connection = socket.create_connection((host, int(port)), timeout=10)
        connection.sendall(token.encode())
        _listen(connection)


def _accept(server: socket.socket, token: bytes) -> None:
    """Whoever knows the token is one of us; others may knock as they like."""
    while len(_connections) < jax.process_count() - 1:
        connection = server.accept()[0]
        with contextlib.suppress(OSError):
            connection.settimeout(10)
            if connection.recv(len(token), socket.MSG_WAITALL) == token:
                _listen(connection)


def _listen(connection: socket.socket) -> None:
    def wait() -> None:
        heard = b""
        with contextlib.suppress(OSError):
            connection.settimeout(None)
            heard = connection.recv(1)
        if heard != BYE:
            _end(
                "another process of this run has ended; the same command in all of them goes on from what was saved", 1
            )

    _connections.append(connection)
    threading.Thread(target=wait, daemon=True).start()


def _end(message: str, code: int) -> None:
    """At once: the main thread waits for what will not come."""
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)

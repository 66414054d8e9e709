"""metrics.jsonl and TensorBoard events: the metrics of a run during training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tensorboardX import SummaryWriter

from exvae import files
from exvae.scale import sharding


@runtime_checkable
class Writer(Protocol):
    """Receives the metrics of a run."""

    def write(self, step: int, epoch: int, split: str, values: dict[str, Any]) -> None:
        """Write the metrics of a split at a step."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class MetricsWriter:
    """Writes metrics.jsonl and TensorBoard events. When a run resumes, lines of later steps are removed first."""

    def __init__(self, workdir: Path, step: int):
        self._path = workdir / "metrics.jsonl"
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if _belongs(line, step)]
            files.write_text(self._path, "".join(line + "\n" for line in kept))
        self._file = open(self._path, "a")  # noqa: SIM115  (closed by close)
        self._events = SummaryWriter(str(workdir), purge_step=step + 1)

    def write(self, step: int, epoch: int, split: str, values: dict[str, Any]) -> None:
        """Write the metrics of a split at a step."""
        print(json.dumps({"step": step, "epoch": epoch, "split": split, **values}), file=self._file, flush=True)
        for name, value in values.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{split}/{name}", value, step)
        self._events.flush()

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._events.close()


class NoWriter:
    """The writer of all processes except the main one: it writes nothing."""

    def write(self, step: int, epoch: int, split: str, values: dict[str, Any]) -> None:
        """Do nothing."""
        pass

    def close(self) -> None:
        """Do nothing."""
        pass


def _belongs(line: str, step: int) -> bool:
    """Whether to keep a line: not if it is incomplete, of a later step, or of the test, which runs again."""
    try:
        values = json.loads(line)
        return values["step"] <= step and values["split"] != "test"
    except (ValueError, KeyError):
        return False


def append_metrics(workdir: Path, step: int, epoch: int, split: str, values: dict[str, Any]) -> None:
    """Append one line to metrics.jsonl, even while another process has it open."""
    if not sharding.is_main():
        return
    with open(workdir / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": step, "epoch": epoch, "split": split, **values}), file=file)

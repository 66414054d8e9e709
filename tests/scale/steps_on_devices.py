"""Twenty training steps on meshes of several sizes, for test_distributed.py, which starts it as a process of its own.

python tests/scale/steps_on_devices.py OUT.npz [COORDINATOR PROCESS_ID]

OUT has loss, parameters and their average of every setting, on meshes of 1, 2 and 4 of the process's devices, or with a
coordinator on all devices of two processes (`settings` says which are where).
"""

import functools
import sys
import tempfile
from pathlib import Path
from unittest import mock

import chex
import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from exvae import config as configs
from exvae.models import convhvae
from exvae.runs.progress import Progress
from exvae.runs.writer import NoWriter
from exvae.scale import processes, sharding
from exvae.state import state_shardings
from exvae.training import loop
from exvae.training.feed import Feeder, uses_index, uses_table
from exvae.training.setup import start
from tests.conftest import TINY_FIELDS

SETTINGS = [
    ("vae", "none"),
    ("vae", "exact"),
    ("vae", "scann"),
    ("convhvae", "none"),
    ("convhvae", "scann"),
    ("vae", "host"),
]
FIELDS = {"train.batch_size": 16, "retrieval.rebuild_steps": 6, "model.hidden_dim": 8, "prior.num_exemplars": 50}


def settings(num_devices: int, num_processes: int) -> list[tuple[str, str]]:
    """All of them on one and, but for images on the host, four devices. Compiling is most of the time, so that two
    devices have only the neighbours' search, and two processes what each of them does in its own way.
    """
    if num_devices == 2:
        return [("vae", "exact")]
    if num_processes == 2:
        return [("vae", "none"), ("vae", "exact"), ("convhvae", "scann"), ("vae", "host")]
    return SETTINGS if num_devices == 1 else SETTINGS[:-1]


def make_config(architecture: str, search: str, images: Path):
    """`host`: exact search, with images that are not on the devices."""
    config = configs.get_config()
    config.update_from_flattened_dict({**TINY_FIELDS, **FIELDS})
    config.data.name = f"npz:{images}"
    config.model.architecture, config.model.channels = architecture, 4
    config.retrieval.search = "exact" if search == "host" else search
    if architecture == "convhvae":
        config.optim.estimator, config.optim.ema, config.objective.samples = "stl", 0.9, 2
    elif search in ("exact", "host"):
        config.objective.samples = 2
    config.data.device_mib = 1e-6 if search == "host" else 0.0
    return config


@functools.cache
def first_state(architecture: str, images: Path):
    """Initialised and encoded only once: that takes as long to compile as the step."""
    setup = loop.prepare(make_config(architecture, "scann", images), Path(tempfile.mkdtemp()))
    state, _ = start(setup, mock.Mock(restore_latest=lambda like: None))
    return jax.tree.map(np.array, sharding.fetch(state))


def place(state, setup):
    """On the devices of `setup`, as its config needs it."""
    num_rows = sharding.round_up(len(setup.store), setup.mesh)
    fill = lambda table: np.pad(table[: len(setup.store)], ((0, num_rows - len(setup.store)), (0, 0)))  # noqa: E731
    state = state.replace(
        table=fill(state.table) if uses_table(setup.config) else None,
        indexed=tuple(map(fill, state.indexed)) if uses_index(setup.config) else None,
    )
    put = lambda place, part: sharding._put(place, part)  # noqa: E731
    return jax.tree.map(put, state_shardings(setup.mesh), state, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding))


def run_steps(architecture: str, search: str, images: Path) -> dict[str, np.ndarray]:
    """The first epoch, which is twenty steps."""
    setup = loop.prepare(make_config(architecture, search, images), Path(tempfile.mkdtemp()))
    chex.clear_trace_counter()
    assert setup.steps_per_epoch == 20
    state = place(first_state(architecture, images), setup)
    tools = loop.Tools(
        checkpoints=mock.Mock(),
        writer=NoWriter(),
        progress=Progress(20, 16),
        stopwatch=loop.Stopwatch({}),
        feeder=Feeder(setup.config, setup.model, setup.mesh, setup.store, state),
    )
    state = loop._run_epoch(setup, tools, state, 1)
    assert int(state.step) == 20
    values = {"params": state.params, "average": state.average, "loss": state.sums["loss"]}
    leaves = jax.tree_util.tree_leaves_with_path(values)
    return {jax.tree_util.keystr(path): sharding.fetch(leaf) for path, leaf in leaves}


def main(out: str, coordinator: str = "", process_id: str = "-1") -> None:
    # Few layers: they compile faster.
    convhvae.Z1_STACK = convhvae.Z2_STACK = ((2, 3, 4),)
    convhvae.DECODER_LAYERS = 1
    if coordinator:
        processes.join(coordinator, 2, int(process_id))
    images = Path(out).with_name(f"images-{process_id}.npz")
    # N = 322. Seed 0 gives a weight whose first gradient is 3e-8 of its tensor's, which is rounding: Adam makes a step
    # of it, of another length on other devices.
    np.savez(images, images=np.random.default_rng(1).integers(0, 256, (402, 6, 6, 1), dtype=np.uint8))
    found = {}
    for size in [4] if coordinator else [1, 2, 4]:
        mesh = Mesh(np.array(jax.devices()[:size]), (sharding.AXIS,), axis_types=(AxisType.Auto,))
        for architecture, search in settings(size, 2 if coordinator else 1):
            with mock.patch.object(sharding, "make_mesh", lambda batch_size=0, mesh=mesh: mesh):
                values = run_steps(architecture, search, images)
            found |= {f"{size}/{architecture}/{search}/{name}": value for name, value in values.items()}
    if sharding.is_main():
        np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

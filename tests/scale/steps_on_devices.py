"""Twenty training steps on meshes of several sizes. test_distributed.py runs this script as a subprocess.

python tests/scale/steps_on_devices.py OUT.npz [COORDINATOR PROCESS_ID]

OUT holds the loss, the parameters and their average for the settings of `settings`: on meshes of 1, 2 and 4 devices of
this process or, with a coordinator, on all devices of two processes.
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
    """The settings for a mesh: all of them on one device, and all except images on the host on four devices.

    Most of the time is compilation. So two devices have only the neighbour search, and two processes only the settings
    in which processes differ in their work.
    """
    if num_devices == 2:
        return [("vae", "exact")]
    if num_processes == 2:
        return [("vae", "none"), ("vae", "exact"), ("convhvae", "scann"), ("vae", "host")]
    return SETTINGS if num_devices == 1 else SETTINGS[:-1]


def make_config(architecture: str, search: str, images: Path):
    """The search `host` is exact search with the images on the host."""
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
    """The first state. It is computed once, because initialisation and encoding compile as long as a step."""
    setup = loop.prepare(make_config(architecture, "scann", images), Path(tempfile.mkdtemp()))
    state, _ = start(setup, mock.Mock(restore_latest=lambda like: None))
    return jax.tree.map(np.array, sharding.fetch(state))


def place(state, setup):
    """Places the state on the devices of `setup`, with the fields that its config needs."""
    num_rows = sharding.round_up(len(setup.store), setup.mesh)
    fill = lambda table: np.pad(table[: len(setup.store)], ((0, num_rows - len(setup.store)), (0, 0)))  # noqa: E731
    state = state.replace(
        table=fill(state.table) if uses_table(setup.config) else None,
        indexed=tuple(map(fill, state.indexed)) if uses_index(setup.config) else None,
    )
    put = lambda place, part: sharding._put(place, part)  # noqa: E731
    return jax.tree.map(put, state_shardings(setup.mesh), state, is_leaf=lambda x: isinstance(x, jax.sharding.Sharding))


def run_steps(architecture: str, search: str, images: Path) -> dict[str, np.ndarray]:
    """Runs the first epoch, which has twenty steps. Returns the loss, the parameters and their average."""
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
    if architecture == "convhvae" and search == "none":  # also several devices have the fast convolution of a CPU
        batch = tools.feeder(state, 0, np.arange(16, dtype=np.int32))
        assert "stablehlo.convolution" not in setup.train_step.lower(state, batch).as_text()
    state = loop._run_epoch(setup, tools, state, 1)
    assert int(state.step) == 20
    values = {"params": state.params, "average": state.average, "loss": state.sums["loss"]}
    leaves = jax.tree_util.tree_leaves_with_path(values)
    return {jax.tree_util.keystr(path): sharding.fetch(leaf) for path, leaf in leaves}


def main(out: str, coordinator: str = "", process_id: str = "-1") -> None:
    # Fewer layers compile faster.
    convhvae.Z1_STACK = convhvae.Z2_STACK = ((2, 3, 4),)
    convhvae.DECODER_LAYERS = 1
    if coordinator:
        processes.join(coordinator, 2, int(process_id))
    images = Path(out).with_name(f"images-{process_id}.npz")
    # N = 322. With seed 0, the first gradient of one weight is only rounding error (3e-8 of its tensor's gradient).
    # Adam turns it into a step whose length depends on the devices.
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

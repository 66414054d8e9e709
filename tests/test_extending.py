"""The prior, the architecture, the data source and the search library that docs/extending.md adds."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from exvae.data import registry
from exvae.models import ARCHITECTURES
from exvae.priors import PRIORS
from exvae.retrieval.index import INDEXES
from exvae.training import loop

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


@pytest.fixture(scope="module")
def namespace():
    """The names that the Python blocks of the page define. The registries are restored afterwards."""
    registries = (PRIORS, ARCHITECTURES, registry.SOURCES, INDEXES)
    before = [dict(one) for one in registries]
    names: dict = {"__name__": "extending"}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    yield names
    for one, entries in zip(registries, before, strict=True):
        one.clear()
        one.update(entries)


@pytest.mark.parametrize(
    "fields",
    [
        {"prior.name": "laplace"},
        {"model.architecture": "linear", "data.name": "squares", "retrieval.search": "kd_tree"},
    ],
    ids=["prior", "architecture, source and search"],
)
def test_parts_that_the_page_adds_train(namespace, tiny_config, tmp_path, fields):
    tiny_config.update_from_flattened_dict({**fields, "train.epochs": 2, "optim.learning_rate": 5e-3})
    results = loop.train(tiny_config, tmp_path)
    assert np.isfinite(results["test"]["log_likelihood"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, last = (line["elbo"] for line in lines if line["split"] == "train")
    assert last > first + 5

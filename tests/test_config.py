"""The config: every field is read, every experiment loads, defaults are the paper's."""

import importlib
import re
from pathlib import Path

import pytest

from exvae import config as configs
from exvae.errors import UserError

ROOT = Path(__file__).parents[1]
PAPER = [f"{data}_{model}" for data in ("mnist", "fashion_mnist", "omniglot") for model in ("vae", "hvae", "convhvae")]


def test_every_field_is_read_by_the_code():
    """No dead options: `something.field` stands in a module other than config.py."""
    files = [path for path in (ROOT / "exvae").rglob("*.py") if path.name != "config.py"]
    code = "\n".join(path.read_text() for path in files)
    resolved = (ROOT / "exvae" / "config.py").read_text().split("def resolve")[1]
    for field in configs.field_names():
        name = field.split(".")[-1]
        assert re.search(rf"config[a-z_]*(\.\w+)?\.{name}\b", code + resolved), field


@pytest.mark.parametrize("name", [*PAPER, "quickstart"])
def test_experiment_loads_and_is_valid(name):
    module = importlib.import_module(f"experiments.{name}")
    for argument in ("", "prior=gaussian", "prior=vamp", "prior=exemplar,recipe=fast"):
        if name == "quickstart" and "recipe" in argument:
            with pytest.raises(UserError, match="recipe"):
                module.get_config(argument)
            continue
        config = module.get_config(argument)
        configs.validate(config)
        expected = argument.split("prior=")[1].split(",")[0] if argument else "exemplar"
        assert config.prior.name == expected
    assert name in module.__doc__


@pytest.mark.parametrize("name", PAPER)
def test_experiment_defaults_are_the_papers(name):
    config = importlib.import_module(f"experiments.{name}").get_config()
    assert f"{config.data.name}_{config.model.architecture}" == name
    assert (config.optim.learning_rate, config.optim.schedule, config.optim.kl_warmup_epochs) == (5e-4, "constant", 100)
    assert (config.train.batch_size, config.train.patience) == (100, 50)
    assert (config.model.latent_dim, config.retrieval.num_neighbours) == (40, 10)
    assert config.retrieval.search == ("exact" if "conv" in name else "none")
    assert config.prior.num_pseudo_inputs == (1000 if "omniglot" in name else 500)
    assert configs.resolve(config, 50_000).prior.num_exemplars == 25_000


def test_resolve_leaves_the_given_config_alone_and_checks_ranges():
    config = configs.get_config()
    assert configs.resolve(config, 1001).prior.num_exemplars == 500
    assert config.prior.num_exemplars == 0
    config.prior.num_exemplars, config.prior.leave_one_out = 1, False
    config.retrieval.num_neighbours, config.retrieval.search = 1, "exact"
    assert configs.resolve(config, 1001).prior.num_exemplars == 1
    config.prior.leave_one_out = True
    with pytest.raises(UserError, match="num_exemplars=1 must lie in 2..1001"):
        configs.resolve(config, 1001)


def test_differences_name_what_matters():
    one, other = configs.get_config().to_dict(), configs.get_config().to_dict()
    other["train"]["epochs"], other["data"]["dir"] = 7, "elsewhere"
    assert configs.differences(one, other) == []
    other["prior"]["num_exemplars"] = 3
    assert configs.differences(one, other) == ["prior.num_exemplars: 0 here, 3 in the run"]
    del other["prior"]["num_exemplars"]
    assert configs.differences(one, other) == ["prior.num_exemplars: 0 here, None in the run"]


def test_differences_hold_the_number_of_epochs_where_the_rate_depends_on_it():
    one, other = configs.get_config().to_dict(), configs.get_config().to_dict()
    one["optim"]["schedule"] = other["optim"]["schedule"] = "cosine"
    other["train"]["epochs"] = 7
    assert configs.differences(one, other) == ["train.epochs: 2000 here, 7 in the run"]


def test_readme_lists_every_field_with_its_default():
    table = dict(re.findall(r"^\| `([a-z_.]+)` \| (.*?) \| ", (ROOT / "README.md").read_text(), re.M))
    flat = configs._flat(configs.get_config().to_dict())
    assert flat.keys() <= table.keys()
    for field, default in flat.items():
        text = table[field].strip("`")
        assert text in (str(default), repr(default)) or float(text) == default, field

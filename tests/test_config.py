"""The config: every field is read, every experiment loads, and the defaults are those of the paper."""

import importlib
import re
from pathlib import Path

import pytest

from exvae import config as configs
from exvae.errors import UserError
from exvae.reproduce import paper
from tests.fields_read import fields_read, package_sources

ROOT = Path(__file__).parents[1]
MODELS = ("vae", "hvae", "convhvae", "pixelsnail")
PAPER = [f"{data}_{model}" for data in ("mnist", "fashion_mnist", "omniglot") for model in MODELS]


FIELDS = configs.flat(configs.get_config())
GROUPS = {field.split(".")[0] for field in FIELDS if "." in field}


def test_every_field_is_read_by_the_code():
    """There are no unused options, and the code reads no field that does not exist."""
    found = fields_read(package_sources(ROOT), GROUPS)
    assert FIELDS.keys() - found == set()
    assert {name for name in found - FIELDS.keys() - GROUPS if name.split(".")[-1] != "to_dict"} == set()


USES = """
from exvae import b
from exvae.b import third, unseen

WORDS = ("lambdas", "split")

def first(config, run):
    options, rate = run.config.train, config.optim.floor
    b.second(options, steps=7)
    config.train.patience = 3
    return {word: run.config.augment[word] for word in WORDS}, config.seed, epochs.networks

def fourth(config):
    config = config.optim
    third(config.ema, group=config)

class Feeder:
    def __call__(self, own):
        return lambda: self._config.retrieval.search
"""
CALLED = """
def second(chosen, steps):
    def inner(options):
        return chosen.epochs + options.batch_size
    return inner

def third(value, group):
    return group.schedule

def unseen(group, config):
    return group.rise_steps, config.data.dir
"""


def test_fields_read_follows_names_to_their_group():
    """`chosen.epochs` below is `train.epochs`, not `augment.epochs`. Assignments, loops and calls are followed."""
    found = fields_read({"exvae.a": USES, "exvae.b": CALLED}, GROUPS) - GROUPS
    assert found == {
        "seed", "optim.floor", "optim.ema", "optim.schedule", "train.epochs", "augment.lambdas", "augment.split",
        "retrieval.search", "data.dir",
    }  # fmt: skip


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
    assert config.retrieval.search == ("none" if config.model.architecture in ("vae", "hvae") else "exact")
    assert config.prior.num_pseudo_inputs == (1000 if "omniglot" in name else 500)
    assert configs.resolve(config, 50_000).prior.num_exemplars == 25_000


def test_celeba_has_the_papers_settings_and_runlocal_smaller_ones():
    from experiments import celeba, mnist_pixelsnail

    config = celeba.get_config()
    configs.validate(config)
    assert (config.model.latent_dim, config.retrieval.num_neighbours, config.retrieval.search) == (128, 5, "exact")
    assert paper.cell(config.to_dict()).bits_per_dim == 5.780 and "5.780" in celeba.__doc__
    assert config.train.batch_size == 100 and config.optim.schedule == "constant"
    for module, argument in ((celeba, "prior=gaussian,runlocal"), (mnist_pixelsnail, "runlocal")):
        small = module.get_config(argument)
        configs.validate(small)
        assert small.model.channels < 64 and small.train.epochs < 10
        assert paper.cell(small.to_dict()) is None
    assert small == mnist_pixelsnail.get_config("runlocal=true") != mnist_pixelsnail.get_config("runlocal=false")


@pytest.mark.parametrize(
    ("argument", "data", "m", "leave_one_out"),
    [
        ("", "mnist", 50_000, True),
        ("leave_one_out=false", "mnist", 50_000, False),
        ("data=omniglot", "omniglot", 23_000, True),
        ("data=omniglot,leave_one_out=false", "omniglot", 23_000, False),
    ],
)
def test_ablation_of_leave_one_out_has_the_papers_settings(argument, data, m, leave_one_out):
    check_ablation("ablation_loo", argument, data, m, leave_one_out)


@pytest.mark.parametrize("data", ["mnist", "omniglot"])
@pytest.mark.parametrize("fraction", ["1", "0.5", "0.2", "0.1"])
def test_ablation_of_subsampling_has_the_papers_settings(data, fraction):
    m = {"mnist": [50_000, 25_000, 10_000, 5_000], "omniglot": [23_000, 11_500, 4_600, 2_300]}
    expected = m[data][["1", "0.5", "0.2", "0.1"].index(fraction)]
    check_ablation("ablation_subsampling", f"data={data},fraction={fraction}", data, expected, True)


def test_ablation_of_subsampling_defaults_to_half_of_mnist():
    check_ablation("ablation_subsampling", "", "mnist", 25_000, True)


def check_ablation(name, argument, data, m, leave_one_out):
    """Both recipes are valid, differ from the defaults in M and leave-one-out, and are a cell of the paper's tables."""
    module = importlib.import_module(f"experiments.{name}")
    cells = []
    for recipe, search in (("paper", "none"), ("fast", "exact")):
        config = module.get_config(",".join(filter(None, [argument, "recipe=fast" if recipe == "fast" else ""])))
        configs.validate(config)
        config = configs.resolve(config, paper.NUM_TRAIN[data])
        assert (config.data.name, config.model.architecture, config.prior.name) == (data, "vae", "exemplar")
        assert (config.prior.num_exemplars, config.prior.leave_one_out) == (m, leave_one_out)
        assert (config.retrieval.search, config.optim.schedule == "cosine") == (search, recipe == "fast")
        cells.append(paper.cell(config.to_dict(), None))
    assert cells[0] == cells[1] and f"{cells[0].log_likelihood:.2f}" in module.__doc__


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("ablation_loo", "leave_one_out=True", "must be one of true, false; did you mean 'true'?"),
        ("ablation_loo", "data=mnst", "data must be one of mnist, omniglot; did you mean 'mnist'?"),
        ("ablation_loo", "data=fashion_mnist", "data must be one of mnist, omniglot"),
        ("ablation_loo", "fraction=1", "'fraction' is not one of data, leave_one_out, recipe"),
        ("ablation_loo", "prior=vamp", "'prior' is not one of"),
        ("ablation_subsampling", "fraction=.2", "fraction must be one of 0.5, 1, 0.2, 0.1; did you mean '0.2'?"),
        ("ablation_subsampling", "fraction", "fraction must be one of"),
        ("ablation_subsampling", "recipe=quick", "recipe must be one of paper, fast"),
        ("ablation_subsampling", "fractions=1", "did you mean 'fraction'?"),
        ("mnist_vae", "prior=vam", "prior must be one of exemplar, gaussian, vamp; did you mean 'vamp'?"),
        ("mnist_vae", "data=mnist", "'data' is not one of prior, recipe"),
    ],
)
def test_bad_arguments_of_an_experiment_are_refused(name, argument, message):
    with pytest.raises(UserError, match=re.escape(message)):
        importlib.import_module(f"experiments.{name}").get_config(argument)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ema", -0.1, "config.optim.ema=-0.1 must be at least 0 and less than 1"),
        ("ema", 1.0, "config.optim.ema=1.0 must be at least 0 and less than 1"),
        ("ema", float("nan"), "config.optim.ema=nan must be at least 0 and less than 1"),
        ("estimator", "st", "config.optim.estimator='st' must be one of plain, stl; did you mean 'stl'?"),
        ("estimator", "", "config.optim.estimator='' must be one of plain, stl"),
    ],
)
def test_bad_options_of_the_gradient_are_refused_in_one_line(field, value, message):
    config = configs.get_config()
    config.optim[field] = value
    with pytest.raises(UserError) as raised:
        configs.validate(config)
    assert str(raised.value) == message


@pytest.mark.parametrize(("estimator", "ema"), [("plain", 0.0), ("stl", 0.9999)])
def test_good_options_of_the_gradient_are_accepted(estimator, ema):
    config = configs.get_config()
    config.optim.estimator, config.optim.ema = estimator, ema
    configs.validate(config)


def test_resolve_does_not_change_its_argument_and_checks_ranges():
    config = configs.get_config()
    assert configs.resolve(config, 1001).prior.num_exemplars == 500
    assert config.prior.num_exemplars == 0
    config.prior.num_exemplars, config.prior.leave_one_out = 1, False
    config.retrieval.num_neighbours, config.retrieval.search = 1, "exact"
    assert configs.resolve(config, 1001).prior.num_exemplars == 1
    config.prior.leave_one_out = True
    with pytest.raises(UserError, match="num_exemplars=1 must lie in 2..1001"):
        configs.resolve(config, 1001)


def test_differences_name_only_fields_that_matter():
    one, other = configs.get_config().to_dict(), configs.get_config().to_dict()
    other["train"]["epochs"], other["data"]["dir"] = 7, "elsewhere"
    assert configs.differences(one, other) == []
    other["prior"]["num_exemplars"] = 3
    assert configs.differences(one, other) == ["prior.num_exemplars: 0 here, 3 in the run"]
    del other["prior"]["num_exemplars"]
    assert configs.differences(one, other) == []  # a run that is older than the field had the default


def test_differences_include_the_epochs_if_the_rate_depends_on_them():
    one, other = configs.get_config().to_dict(), configs.get_config().to_dict()
    one["optim"]["schedule"] = other["optim"]["schedule"] = "cosine"
    other["train"]["epochs"] = 7
    assert configs.differences(one, other) == ["train.epochs: 2000 here, 7 in the run"]

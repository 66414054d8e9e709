"""The paper's numbers (Norouzi et al., 2020, arXiv:2004.04795), for comparison with runs.

The constants and the labels of their tables in the paper's source: LOG_LIKELIHOOD is tab:loglikelihood,
WITHOUT_LEAVE_ONE_OUT is table-log-like, SUBSAMPLING is table:ablation-subsampling. In the supplement,
KL_AND_RECONSTRUCTION is tab:reconst_kl, ACTIVE_UNITS is tab:posterior_collapse, CELEBA_BITS_PER_DIM is tab:my_label.
Log-likelihoods, KL and reconstruction are in nats per test image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# N. The keys are in the order of the columns below.
NUM_TRAIN = {"mnist": 50_000, "fashion_mnist": 50_000, "omniglot": 23_000}

# IWAE with 5000 samples: mean and ± over 5 training runs.
LOG_LIKELIHOOD = {
    ("vae", "gaussian"): ((-84.45, 0.12), (-228.70, 0.15), (-108.34, 0.06)),
    ("vae", "vamp"): ((-82.43, 0.06), (-227.35, 0.05), (-106.78, 0.21)),
    ("vae", "exemplar"): ((-82.09, 0.18), (-226.75, 0.07), (-105.22, 0.18)),
    # The paper prints the middle number without its minus sign.
    ("hvae", "gaussian"): ((-82.39, 0.11), (-227.37, 0.10), (-104.92, 0.08)),
    ("hvae", "vamp"): ((-81.56, 0.09), (-226.72, 0.08), (-103.30, 0.43)),
    ("hvae", "exemplar"): ((-81.22, 0.05), (-226.53, 0.09), (-102.25, 0.43)),
    ("convhvae", "gaussian"): ((-80.52, 0.28), (-225.38, 0.08), (-98.12, 0.17)),
    ("convhvae", "vamp"): ((-79.67, 0.09), (-224.67, 0.03), (-97.30, 0.07)),
    ("convhvae", "exemplar"): ((-79.58, 0.07), (-224.63, 0.06), (-96.38, 0.24)),
    ("pixelsnail", "gaussian"): ((-78.20, 0.02), (-223.68, 0.03), (-89.59, 0.07)),
    ("pixelsnail", "vamp"): ((-77.90, 0.02), (-223.45, 0.02), (-89.50, 0.13)),
    ("pixelsnail", "exemplar"): ((-77.95, 0.01), (-223.26, 0.01), (-89.28, 0.12)),
}

# KL, and the negative of the reconstruction term, as in the paper.
KL_AND_RECONSTRUCTION = {
    ("vae", "gaussian"): ((25.54, 63.06), (18.38, 213.21), (32.97, 82.30)),
    ("vae", "vamp"): ((25.14, 60.79), (18.44, 211.37), (34.17, 79.49)),
    ("vae", "exemplar"): ((24.82, 61.00), (18.32, 211.10), (32.66, 80.25)),
    ("hvae", "gaussian"): ((26.80, 59.80), (19.08, 211.18), (36.07, 75.96)),
    ("hvae", "vamp"): ((26.69, 58.46), (19.27, 210.04), (38.39, 72.42)),
    ("hvae", "exemplar"): ((26.41, 58.48), (18.96, 210.40), (36.76, 73.35)),
    ("convhvae", "gaussian"): ((26.58, 57.64), (20.34, 208.11), (38.90, 67.22)),
    ("convhvae", "vamp"): ((26.57, 56.18), (20.65, 206.64), (38.95, 66.38)),
    ("convhvae", "exemplar"): ((26.41, 56.14), (20.46, 207.18), (37.48, 66.62)),
    ("pixelsnail", "gaussian"): ((5.73, 72.92), (4.68, 219.51), (0.01, 89.57)),
    ("pixelsnail", "vamp"): ((7.17, 71.23), (6.07, 218.00), (1.07, 88.54)),
    ("pixelsnail", "exemplar"): ((10.94, 67.89), (10.35, 213.95), (10.03, 80.19)),
}

# Of 40 units; for hierarchical architectures, those of z2.
ACTIVE_UNITS = {
    ("vae", "gaussian"): (24.0, 26.0, 35.2),
    ("vae", "vamp"): (27.6, 35.25, 40.0),
    ("vae", "exemplar"): (29.4, 36.0, 40.0),
    ("hvae", "gaussian"): (15.0, 12.4, 24.8),
    ("hvae", "vamp"): (20.4, 23.2, 39.0),
    ("hvae", "exemplar"): (21.6, 28.6, 38.6),
    ("convhvae", "gaussian"): (19.8, 15.4, 39.2),
    ("convhvae", "vamp"): (19.0, 19.25, 39.8),
    ("convhvae", "exemplar"): (25.8, 33.6, 40.0),
    ("pixelsnail", "gaussian"): (4.6, 2.4, 0.0),
    ("pixelsnail", "vamp"): (17.2, 30.6, 9.5),
    ("pixelsnail", "exemplar"): (25.8, 37.2, 25.5),
}

# The ablations: VAE, exemplar prior. For M = N with leave-one-out, both tables of the paper have the same number.
WITHOUT_LEAVE_ONE_OUT = {"mnist": -101.33, "omniglot": -139.12}  # M = N
SUBSAMPLING = {  # by M/N
    "mnist": {1.0: -82.35, 0.5: -82.09, 0.2: -82.12, 0.1: -82.20},
    "omniglot": {1.0: -105.80, 0.5: -105.22, 0.2: -104.95, 0.1: -105.42},
}

# The best epoch in the log of a run that the authors published: MNIST, vae, exemplar, exact prior, batches of 100.
AUTHORS_VALID_ELBO, AUTHORS_EPOCHS = -85.85, 1038
AUTHORS_STEP_SECONDS = 0.77  # their code with the exact prior, batches of 100, on two cores (AVX-512)

CELEBA_NUM_TRAIN, CELEBA_SIZES = 162_770, {"latent_dim": 128, "channels": 64, "likelihood": "discretized_logistic"}
CELEBA_BITS_PER_DIM = {"gaussian": 5.825, "exemplar": 5.780}


class Cell(NamedTuple):
    """The paper's numbers for one setting, with natural signs. None: the paper has no number."""

    log_likelihood: float | None = None
    log_likelihood_std: float | None = None
    kl: float | None = None
    reconstruction: float | None = None
    active_units: float | None = None
    bits_per_dim: float | None = None


def cell(config: dict[str, Any], num_train: int | None = None) -> Cell | None:
    """Return the paper's numbers for this config, or None if there are none.

    Args:
      config: the config of results.json.
      num_train: N; None: the number of training images of the data set in the paper.
    """
    name, model, prior = config["data"]["name"], config["model"], config["prior"]
    row = (model["architecture"], prior["name"])
    if name == row[0] == "celeba":
        return _celeba_cell(model, prior, num_train)
    if name not in NUM_TRAIN or row not in LOG_LIKELIHOOD or not _papers_sizes(model):
        return None
    if prior["name"] != "exemplar":
        return _main_cell(name, row)
    n = NUM_TRAIN[name] if num_train is None else num_train
    m = prior["num_exemplars"] or n // 2
    if not prior["leave_one_out"]:
        found = WITHOUT_LEAVE_ONE_OUT.get(name) if row[0] == "vae" and m == n else None
        return None if found is None else Cell(found)
    if _close(m / n, 0.5):
        return _main_cell(name, row)
    fractions = SUBSAMPLING.get(name, {}) if row[0] == "vae" else {}
    return next((Cell(value) for fraction, value in fractions.items() if _close(m / n, fraction)), None)


def _celeba_cell(model: dict[str, Any], prior: dict[str, Any], num_train: int | None) -> Cell | None:
    n = CELEBA_NUM_TRAIN if num_train is None else num_train
    half = prior["leave_one_out"] and _close((prior["num_exemplars"] or n // 2) / n, 0.5)
    same = CELEBA_SIZES.items() <= model.items() and n == CELEBA_NUM_TRAIN and (half or prior["name"] != "exemplar")
    return Cell(bits_per_dim=CELEBA_BITS_PER_DIM.get(prior["name"])) if same else None


def _papers_sizes(model: dict[str, Any]) -> bool:
    """Whether the model has the paper's sizes: 40 latents, 300 hidden units, binary images."""
    return (
        model.get("latent_dim", 40) == 40
        and model.get("lower_latent_dim", 0) in (0, 40)
        and model.get("hidden_dim", 300) == 300
        and model.get("channels", 64) == 64
        and model.get("likelihood", "bernoulli") == "bernoulli"
    )


def _close(value: float, fraction: float) -> bool:
    """Equal within 1 %: N may not divide evenly, and the paper's M/N = 1 is (N - 1)/N."""
    return abs(value - fraction) <= 0.01 * fraction


def _main_cell(name: str, row: tuple[str, str]) -> Cell:
    column = list(NUM_TRAIN).index(name)
    kl, reconstruction = KL_AND_RECONSTRUCTION[row][column]
    return Cell(*LOG_LIKELIHOOD[row][column], kl, -reconstruction, ACTIVE_UNITS[row][column])

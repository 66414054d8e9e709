"""Pictures and samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from exvae import figures, generate, models
from exvae.priors import PRIORS


def test_grid_holds_every_image_at_its_place(tmp_path, rng):
    images = rng.uniform(size=(2, 3, 4, 5, 1)).astype(np.float32)
    figures.save_grid(tmp_path / "new" / "grid.png", images, scale=1)
    picture = np.asarray(Image.open(tmp_path / "new" / "grid.png"))[..., 0] / 255.0
    assert picture.shape == (2 * 5 + 1, 3 * 6 + 1)
    for row in range(2):
        for column in range(3):
            part = picture[1 + row * 5 : 5 + row * 5, 1 + column * 6 : 6 + column * 6]
            np.testing.assert_allclose(part, images[row, column, :, :, 0], atol=1 / 255)


@pytest.mark.parametrize("prior", ["exemplar", "gaussian", "vamp"])
def test_plates_are_decoded_draws_of_the_prior(tiny_config, rng, prior):
    """With sigma -> 0 (and vamp posteriors as they are) every sample of a row is its exemplar's decoded mean."""
    tiny_config.prior.name = prior
    model = models.build(tiny_config.model, (5, 5, 1))
    params = {
        "model": models.init(jax.random.key(0), model),
        "prior": PRIORS[prior].init(jax.random.key(1), tiny_config, (5, 5, 1)),
    }
    images = jnp.asarray(rng.integers(0, 256, (30, 5, 5, 1), dtype=np.uint8))
    if prior == "exemplar":
        params["prior"]["log_var"] = jnp.float32(-60.0)
    plates = generate.sample_plates(jax.random.key(2), tiny_config, model, params, images, rows=4, columns=3)
    assert plates.shape == (4, 3, 5, 5, 1)
    assert ((plates >= 0) & (plates <= 1)).all()
    if prior == "exemplar":
        mu = model.apply({"params": params["model"]}, plates[:, 0], method="encode").mean
        decoded = model.apply({"params": params["model"]}, jax.random.key(0), mu, method="decode")
        for column in (1, 2):
            np.testing.assert_allclose(plates[:, column], decoded, atol=1e-5)
        sources = {image.tobytes() for image in np.asarray(images)}
        assert {np.uint8(np.round(image * 255)).tobytes() for image in np.asarray(plates[:, 0])} < sources

"""Pictures and samples."""

import numpy as np
from PIL import Image

from exvae import figures


def test_grid_holds_every_image_at_its_place(tmp_path, rng):
    images = rng.uniform(size=(2, 3, 4, 5, 1)).astype(np.float32)
    figures.save_grid(tmp_path / "new" / "grid.png", images, scale=1)
    picture = np.asarray(Image.open(tmp_path / "new" / "grid.png").convert("L")) / 255.0
    assert picture.shape == (2 * 5 + 1, 3 * 6 + 1)
    for row in range(2):
        for column in range(3):
            part = picture[1 + row * 5 : 5 + row * 5, 1 + column * 6 : 6 + column * 6]
            np.testing.assert_allclose(part, images[row, column, :, :, 0], atol=1 / 255)

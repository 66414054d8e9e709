"""Figures and single images."""

import numpy as np
from PIL import Image

from exvae.runs import figures


def test_grid_holds_every_image_at_its_place(tmp_path, rng):
    images = rng.uniform(size=(2, 3, 4, 5, 1)).astype(np.float32)
    figures.save_grid(tmp_path / "new" / "grid.png", images, scale=1)
    picture = np.asarray(Image.open(tmp_path / "new" / "grid.png").convert("L")) / 255.0
    assert picture.shape == (2 * 5 + 1, 3 * 6 + 1)
    for row in range(2):
        for column in range(3):
            part = picture[1 + row * 5 : 5 + row * 5, 1 + column * 6 : 6 + column * 6]
            np.testing.assert_allclose(part, images[row, column, :, :, 0], atol=1 / 255)


ORANGE = (255, 140, 0)


def test_marked_images_have_a_frame_and_others_none(tmp_path, rng):
    images = rng.uniform(size=(2, 3, 4, 5, 1)).astype(np.float32)
    figures.save_grid(tmp_path / "grid.png", images, np.arange(3) == 1, scale=1)
    picture = np.asarray(Image.open(tmp_path / "grid.png"))
    orange = (picture == ORANGE).all(-1)
    for row in range(2):
        top, left = row * 5, 6
        assert orange[top, left : left + 7].all() and orange[top : top + 6, left].all()
        assert orange[top + 5, left : left + 7].all() and orange[top : top + 6, left + 6].all()
    assert orange.sum() == 2 * (2 * 7 + 2 * 6 - 4) - 7  # the frames share a line
    assert not orange[:, :6].any() and not orange[:, 13:].any()


def test_plates_are_side_by_side_with_framed_sources(tmp_path, rng):
    plates = rng.uniform(0.2, 1.0, size=(3, 4, 3, 3, 1)).astype(np.float32)
    figures.save_plates(tmp_path / "plates.png", plates, columns=2, source=3)
    picture = np.asarray(Image.open(tmp_path / "plates.png"))[::2, ::2]  # each pixel is drawn as 2 x 2
    height = width = 2 * 4 + 1 + 3  # a plate of 2 x 2 images and the gap
    assert picture.shape[:2] == (2 * height - 3, 2 * width - 3)
    for number, plate in enumerate(plates):
        y, x = number // 2 * height, number % 2 * width
        for place, image in enumerate(plate):
            top, left = y + place // 2 * 4, x + place % 2 * 4
            part = picture[top + 1 : top + 4, left + 1 : left + 4, 0] / 255
            np.testing.assert_allclose(part, image[..., 0], atol=1 / 255)
            below_and_right = picture[[top + 4, top + 2], [left + 2, left + 4]]
            assert (below_and_right == ORANGE).all() == (place == 3)
    assert (picture[height:-1, width:] == 255).all()  # the place of a fourth plate is empty


def test_captioned_images_are_in_rows_above_their_text(tmp_path, rng):
    images = rng.uniform(size=(5, 6, 6, 1)).astype(np.float32)
    captions = ["", "a", "", "b", ""]
    figures.save_captioned(tmp_path / "c.png", images, captions, columns=3, marked=np.arange(5) == 4)
    picture = np.asarray(Image.open(tmp_path / "c.png").convert("RGB"))
    assert picture.shape[:2] == (2 * (16 + 14), 3 * 16)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        top, left = number // 3 * 30, number % 3 * 16
        part = picture[top + 2 : top + 14 : 2, left + 2 : left + 14 : 2, 0] / 255
        np.testing.assert_allclose(part, image[..., 0], atol=1 / 255)
        assert (picture[top + 16 : top + 30, left : left + 16] < 128).any() == bool(caption)
        assert (picture[top, left] == ORANGE).all() == (number == 4)


def test_colour_images_keep_their_colours(tmp_path, rng):
    images = rng.uniform(size=(1, 2, 3, 3, 3)).astype(np.float32)
    figures.save_grid(tmp_path / "grid.png", images, scale=1)
    picture = np.asarray(Image.open(tmp_path / "grid.png")) / 255
    np.testing.assert_allclose(picture[1:4, 5:8], images[0, 1], atol=1 / 255)
    figures.save_images(tmp_path / "singles", images[0])
    np.testing.assert_allclose(
        np.asarray(Image.open(tmp_path / "singles" / "00001.png")) / 255, images[0, 1], atol=1 / 255
    )

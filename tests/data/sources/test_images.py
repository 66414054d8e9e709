"""Folders and zip files of images."""

import zipfile

import numpy as np
import pytest
from PIL import Image

from exvae.data import decoding
from exvae.data.sources import images
from exvae.errors import UserError

RNG = np.random.default_rng(0)


def draw(path, *, size=(8, 8), colour=False):
    """Writes random pixels as a png and returns them."""
    pixels = RNG.integers(0, 256, (size[1], size[0], 3) if colour else (size[1], size[0]), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return pixels


def read(path, **options):
    return decoding.decode(images.find(path, **options), memory_mib=1)


def zipped(folder, path, prefix=""):
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.rglob("*"):
            if file.is_file():
                archive.write(file, prefix + file.relative_to(folder).as_posix())
    return path


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "pictures"


def test_images_of_the_right_size_are_read_unchanged_in_sorted_order(folder):
    pixels = {name: draw(folder / name) for name in ("c.png", "a.png", "b.PNG")}
    (folder / "notes.txt").write_text("not an image")
    (folder / ".hidden.png").write_text("not an image")
    for size in (0, 8):
        parts = read(folder, image_size=size, colour=False)
        expected = np.stack([pixels[name] for name in sorted(pixels)])[..., None]
        np.testing.assert_array_equal(parts["all"].images, expected)
        assert parts["all"].labels is None


def test_images_zip_equals_folder(folder, tmp_path):
    for name in ("x/1.png", "x/2.png", "y/1.png"):
        draw(folder / name, colour=True)
    expected = read(folder, image_size=8, colour=True)["all"]
    for prefix in ("", "root/"):  # a zip file often has one top folder
        archive = zipped(folder, tmp_path / "pictures.zip", prefix)
        found = read(archive, image_size=8, colour=True)["all"]
        np.testing.assert_array_equal(found.images, expected.images)
        assert found.labels.tolist() == expected.labels.tolist() == [0, 0, 1]


def test_images_resize_is_antialiased_and_takes_the_centre_square(folder):
    board = np.indices((56, 56)).sum(0) % 2 * 255  # without antialiasing: all black or all white
    wide = np.concatenate([np.zeros((56, 20)), board, np.zeros((56, 20))], axis=1)
    folder.mkdir()
    Image.fromarray(wide.astype(np.uint8)).save(folder / "a.png")
    found = read(folder, image_size=28, colour=False)["all"].images
    assert found.shape == (1, 28, 28, 1)
    assert np.abs(found[0, 2:-2, 2:-2].astype(int) - 127).max() < 20


def test_images_grey_and_colour_convert(folder):
    rgb = draw(folder / "a.png", colour=True)
    np.testing.assert_array_equal(read(folder, image_size=0, colour=True)["all"].images[0], rgb)
    grey = read(folder, image_size=0, colour=False)["all"].images[0, ..., 0]
    assert np.abs(grey - rgb @ [0.299, 0.587, 0.114]).max() <= 1


def test_images_labels_are_the_sorted_subfolders(folder):
    for name in ("cat/1.png", "ant/1.png", "cat/0.png", "bee/9.png"):
        draw(folder / name)
    labels = read(folder, image_size=8, colour=False)["all"].labels
    assert labels.tolist() == [0, 1, 2, 2] and labels.dtype == np.int32
    draw(folder / "top.png")  # an image outside of the class folders: no labels
    assert read(folder, image_size=8, colour=False)["all"].labels is None


def test_images_folders_train_and_test_are_splits_with_common_labels(folder):
    pixels = {name: draw(folder / name) for name in ("train/a/0.png", "train/b/0.png", "test/b/0.png")}
    parts = read(folder, image_size=8, colour=False)
    assert set(parts) == {"train", "test"}
    assert parts["train"].labels.tolist() == [0, 1] and parts["test"].labels.tolist() == [1]
    np.testing.assert_array_equal(parts["test"].images[0, ..., 0], pixels["test/b/0.png"])


def test_images_of_mixed_size_need_an_image_size(folder):
    draw(folder / "a.png", size=(8, 8))
    draw(folder / "b.png", size=(9, 8))
    with pytest.raises(UserError, match="mixed size: a.png is 8x8, b.png is 9x8"):
        read(folder, image_size=0, colour=False)
    assert read(folder, image_size=4, colour=False)["all"].images.shape == (2, 4, 4, 1)


def test_images_exif_orientation_is_applied(folder):
    folder.mkdir()
    image = Image.fromarray(np.arange(6, dtype=np.uint8).reshape(2, 3))
    exif = Image.Exif()
    exif[0x0112] = 3  # stored upside down
    image.save(folder / "a.png", exif=exif)
    found = read(folder, image_size=0, colour=False)["all"].images[0, ..., 0]
    assert found.tolist() == [[5, 4, 3], [2, 1, 0]]


def test_images_missing_empty_or_negative_is_an_error(folder):
    with pytest.raises(UserError, match="no such folder or zip file"):
        read(folder, image_size=8, colour=False)
    folder.mkdir()
    with pytest.raises(UserError, match="holds no images"):
        read(folder, image_size=8, colour=False)
    with pytest.raises(UserError, match="config.data.image_size=-1"):
        read(folder, image_size=-1, colour=False)


@pytest.mark.parametrize("how", ["cut", "text", "empty"])
def test_images_broken_file_is_named(folder, tmp_path, how):
    draw(folder / "a.png")
    bad = folder / "b.png"
    draw(bad, size=(50, 50))
    bad.write_bytes({"cut": bad.read_bytes()[:1000], "text": b"hello", "empty": b""}[how])
    for path in (folder, zipped(folder, tmp_path / "p.zip")):
        with pytest.raises(UserError, match=r"b.png: broken image: [^\n]*$"):
            read(path, image_size=8, colour=False)


def test_images_more_than_8_bits_is_refused_not_clipped(folder):
    folder.mkdir()
    Image.fromarray(np.full((8, 8), 40000, np.uint16)).save(folder / "a.png")
    with pytest.raises(UserError, match="more than 8 bits a pixel"):
        read(folder, image_size=8, colour=False)


def test_images_broken_zip_is_named(folder, tmp_path):
    draw(folder / "a.png", size=(50, 50))
    archive = zipped(folder, tmp_path / "p.zip")
    data = archive.read_bytes()
    archive.write_bytes(data[:-30])
    with pytest.raises(UserError, match="p.zip: truncated or not a zip file"):
        read(archive, image_size=8, colour=False)
    archive.write_bytes(data[:100] + b"\0" * 50 + data[150:])  # the contents no longer match their checksum
    with pytest.raises(UserError, match="a.png: broken image: Bad CRC"):
        read(archive, image_size=8, colour=False)

"""CelebA from jpgs: the crop, the splits, and errors in the files."""

import io
import zipfile

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from exvae import data
from exvae.data import decoding, registry, splits
from exvae.data.sources import celeba, files
from exvae.data.types import NotHere
from exvae.errors import UserError


def face(seed, size=(178, 218)):
    """A smooth picture, which loses little at half size and in a jpg."""
    coarse = np.random.default_rng(seed).integers(0, 256, (8, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((178, 218), Image.Resampling.BICUBIC).resize(size, Image.Resampling.BOX)


def jpg(image):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95)
    return file.getvalue()


def write_folder(folder, count, size=(89, 109)):
    folder.mkdir(parents=True)
    for i in range(1, count + 1):
        (folder / f"{i:06d}.jpg").write_bytes(jpg(face(i, size)))
    return folder


def write_zip(path, folder, prefix=""):
    with zipfile.ZipFile(path, "w") as archive:
        for file in reversed(sorted(folder.glob("*.jpg"))):  # the order in the archive does not matter
            archive.write(file, prefix + file.name)
    return path


def load(folder, **fields):
    defaults = {"dir": str(folder), "split_seed": 0, "memory_mib": 1024}
    return data.load(ConfigDict({"name": "celeba", **defaults, **fields}), binarize=False)


def read_all(folder):
    return decoding.decode(celeba.read(folder, "celeba"), memory_mib=1024)["all"].images


def images_of(dataset):
    return np.concatenate([part.images for part in vars(dataset).values()])


def test_crop_is_the_middle_140_of_a_full_image():
    ramp = np.broadcast_to(np.arange(178, dtype=np.uint8)[None, :, None], (218, 178, 3))
    steep = np.broadcast_to(np.arange(218, dtype=np.uint8)[:, None, None], (218, 178, 3))
    centres = (np.arange(64) + 0.5) * 140 / 64 - 0.5
    across = np.asarray(celeba.crop("", Image.fromarray(ramp)))[30, :, 0]
    down = np.asarray(celeba.crop("", Image.fromarray(steep)))[:, 30, 0]
    # The filter keeps a linear ramp, except at the ends, where half of the filter is cut off.
    np.testing.assert_allclose(across[2:-2], 19 + centres[2:-2], atol=1)
    np.testing.assert_allclose(down[2:-2], 39 + centres[2:-2], atol=1)
    # No pixel comes from outside of the crop.
    assert across.min() >= 19 and across.max() <= 158 and down.min() >= 39 and down.max() <= 178


def test_crop_is_antialiased():
    board = np.repeat((np.indices((218, 178)).sum(0) % 2 * 255).astype(np.uint8)[..., None], 3, axis=2)
    small = np.asarray(celeba.crop("", Image.fromarray(board))).astype(int)
    assert np.abs(small[2:-2, 2:-2] - 127).max() < 25


@pytest.mark.parametrize("seed", range(3))
def test_crop_of_full_and_half_size_agree(seed):
    full, half = (np.asarray(celeba.crop("", face(seed, size))).astype(int) for size in ((178, 218), (89, 109)))
    assert full.shape == half.shape == (64, 64, 3)
    error = np.abs(full - half).mean()
    shifted = np.abs(full[:, 1:] - half[:, :-1]).mean()
    assert error < 1 and error < shifted / 4


@pytest.mark.parametrize("prefix", ["", "img_align_celeba/"])
def test_celeba_zip_and_folders_give_the_same_bytes(tmp_path, prefix):
    folder = write_folder(tmp_path / "a" / "celeba", 12)
    (folder / "notes.txt").write_text("no image")
    expected = read_all(folder)
    assert expected.shape == (12, 64, 64, 3) and expected.dtype == np.uint8
    direct = np.stack([np.asarray(celeba.crop("", Image.open(path))) for path in sorted(folder.glob("*.jpg"))])
    np.testing.assert_array_equal(expected, direct)
    (tmp_path / "b").mkdir()
    write_zip(tmp_path / "b" / "img_align_celeba_half.zip", folder, prefix)
    np.testing.assert_array_equal(read_all(tmp_path / "b"), expected)
    for place in ("c", "d/img_align_celeba", "e/img_align_celeba/img_align_celeba"):
        write_folder(tmp_path / place, 12)
        np.testing.assert_array_equal(read_all(tmp_path / place[0]), expected)


@pytest.mark.parametrize("sub", ["", "celeba"])
def test_celeba_is_found_in_the_users_folder(tmp_path, sub):
    jpgs = write_folder(tmp_path / "jpgs" / "celeba", 10)
    (tmp_path / "data" / sub).mkdir(parents=True)
    write_zip(tmp_path / "data" / sub / "x.zip", jpgs)
    found, expected = load(tmp_path / "data"), load(tmp_path / "jpgs")
    np.testing.assert_array_equal(images_of(found), images_of(expected))
    assert found.train.labels is None


def test_celeba_larger_of_two_copies_is_read(tmp_path):
    folder = write_folder(tmp_path / "img_align_celeba", 5)
    write_zip(tmp_path / "first.zip", folder)
    (folder / "000005.jpg").unlink()
    (tmp_path / "broken.zip").write_bytes(b"PK")
    assert len(read_all(tmp_path)) == 5


def test_celeba_part_is_split_like_arrays(tmp_path):
    write_folder(tmp_path / "celeba", 30)
    everything = decoding.decode(celeba.read(tmp_path / "celeba", ""), memory_mib=1024)
    for seed in (0, 7):
        expected, found = splits.assign(everything, seed=seed), load(tmp_path, split_seed=seed)
        assert [len(part) for part in vars(found).values()] == [24, 3, 3]
        for part in ("train", "valid", "test"):
            np.testing.assert_array_equal(getattr(found, part).images, getattr(expected, part).images)


def test_celeba_complete_has_the_official_splits(tmp_path, monkeypatch):
    assert sum(celeba.COUNTS.values()) == 202_599 and celeba.COUNTS["train"] + celeba.COUNTS["valid"] == 182_637
    folder = write_folder(tmp_path / "celeba", 12)
    monkeypatch.setattr(celeba, "COUNTS", {"train": 7, "valid": 3, "test": 2})
    images = np.stack([np.asarray(celeba.crop("", Image.open(path))) for path in sorted(folder.glob("*.jpg"))])
    dataset = load(tmp_path, split_seed=5)
    np.testing.assert_array_equal(dataset.train.images, images[:7])
    np.testing.assert_array_equal(dataset.valid.images, images[7:10])
    np.testing.assert_array_equal(dataset.test.images, images[10:])
    (folder / "000003.jpg").rename(folder / "000013.jpg")  # the official number of images, but other file names
    assert [len(part) for part in vars(load(tmp_path)).values()] == [10, 1, 1]


@pytest.mark.parametrize("memory_mib", [1024, 0])
def test_celeba_broken_jpg_is_named(tmp_path, monkeypatch, memory_mib):
    monkeypatch.setenv("EXVAE_CACHE_DIR", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "celeba", 8)
    path = folder / "000004.jpg"
    path.write_bytes(path.read_bytes()[:600])
    with pytest.raises(UserError, match=rf"^{path}: broken image: [^\n]*$"):
        load(tmp_path, memory_mib=memory_mib)
    assert not list((tmp_path / "cache").rglob("*.npy")) and not list((tmp_path / "cache").rglob("*.tmp"))
    archive = write_zip(tmp_path / "x.zip", folder)
    for file in folder.iterdir():
        file.unlink()
    with pytest.raises(UserError, match=rf"^{archive}/000004.jpg: broken image: [^\n]*$"):
        load(tmp_path, memory_mib=memory_mib)


def test_celeba_wrong_size_is_refused(tmp_path):
    path = write_folder(tmp_path / "celeba", 8) / "000006.jpg"
    path.write_bytes(jpg(face(6, (109, 89))))
    with pytest.raises(UserError, match=rf"^{path}: 109x89 pixels, but aligned .* have 178x218 or 89x109$"):
        load(tmp_path)


def test_celeba_duplicate_number_is_refused(tmp_path):
    path = write_zip(tmp_path / "x.zip", write_folder(tmp_path / "y" / "z" / "jpgs", 3))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("more/000002.jpg", b"")
    with pytest.raises(UserError, match=rf"{path}: holds 000002.jpg more than once"):
        load(tmp_path)


@pytest.fixture
def no_tfds(monkeypatch):
    def nowhere(name, folder):
        raise NotHere("not on this machine")

    named = registry.SETS["celeba"]
    places = tuple(place._replace(find=nowhere) if place.label == "TFDS" else place for place in named.places)
    monkeypatch.setitem(registry.SETS, "celeba", registry.dataclasses.replace(named, places=places))


def test_celeba_empty_zip_is_named(tmp_path, no_tfds):
    with zipfile.ZipFile(tmp_path / "img_align_celeba.zip", "w"):
        pass
    with pytest.raises(UserError, match=r"found nowhere: .*img_align_celeba.zip has no such images.*; try: "):
        load(tmp_path)


def test_celeba_broken_zip_is_named(tmp_path):
    path = tmp_path / "img_align_celeba.zip"
    path.write_bytes(b"PK\3\4")
    with pytest.raises(UserError, match=rf"^{path}: truncated or not a zip file: [^\n]*$"):
        load(tmp_path)


def test_celeba_shards_of_wrong_length_are_refused(tmp_path):
    path = tmp_path / "shard"
    path.touch()
    parts = celeba.from_shards(tmp_path, {"train": [(path, 3)]}, lambda path: [jpg(face(0))] * 2)
    with pytest.raises(UserError, match=f"{path}: holds 2 images instead of 3"):
        decoding.decode(parts, memory_mib=1)


def test_file_states_change_with_the_file(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"one")
    before = files.file_states([tmp_path, path])
    (tmp_path / "other.txt").touch()
    assert files.file_states([tmp_path, path]) == before
    path.write_bytes(b"three")
    assert files.file_states([tmp_path, path]) != before

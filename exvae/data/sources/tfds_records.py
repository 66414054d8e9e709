"""Read the files of a TFDS copy (array_record or tfrecord) without TensorFlow."""

from __future__ import annotations

import contextlib
import pathlib
import struct
from collections.abc import Iterator
from typing import Any


def read_features(path: str, file_format: str) -> Iterator[Any]:
    """Yield the features of each example in a file, by name."""
    from tensorflow_datasets.proto import tf_example_pb2

    for record in read_records(path, file_format):
        yield tf_example_pb2.Example.FromString(record).features.feature


def read_records(path: str, file_format: str) -> list[bytes]:
    """Read the serialised examples of a file."""
    if file_format == "array_record":
        from array_record.python.array_record_module import ArrayRecordReader

        with contextlib.closing(ArrayRecordReader(path)) as reader:
            return reader.read_all()
    if file_format == "tfrecord":
        return list(_split_tfrecord(pathlib.Path(path).read_bytes()))
    raise ValueError(f"file format {file_format} is neither array_record nor tfrecord")


def _split_tfrecord(data: bytes) -> Iterator[bytes]:
    """Split a file into records: each has a length (8 bytes), a checksum (4), its content and a checksum (4)."""
    # Checksums are not tested: PNG has its own, and PIL raises an error for a damaged JPEG.
    start = 0
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        start += 12
        if start + length + 4 > len(data):
            raise ValueError("the last record is cut off")
        yield data[start : start + length]
        start += length + 4

"""Files are written completely or not at all."""

import pytest

from exvae import files


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "table.txt"
    files.write_text(path, "old")
    with pytest.raises(RuntimeError), files.replacing(path) as file:
        file.write("half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bytes_and_text_replace_what_was_there(tmp_path):
    path = tmp_path / "file"
    with files.replacing(path, "wb") as file:
        file.write(b"\0\1")
        assert not path.exists()
    assert path.read_bytes() == b"\0\1"
    files.write_text(path, "Σ_n")
    assert path.read_text(encoding="utf-8") == "Σ_n"

"""Records of single images survive a kill and are never used for other settings."""

import json

import numpy as np
import pytest

from exvae.errors import UserError
from exvae.runs.records import Records, fingerprint

SETTINGS = {"method": "pruned", "seed": 0}


def record(image: int, value: float = -1.0) -> dict:
    return {"image": image, "log_likelihood": value}


def open_records(workdir, settings=SETTINGS):
    records = Records(workdir, settings)
    records.close()
    return records


def test_records_are_read_back_bit_for_bit(tmp_path, rng):
    values = rng.normal(size=20).astype(np.float32).astype(float)
    records = Records(tmp_path, SETTINGS)
    for image, value in enumerate(values):
        records.add([record(image, float(value))])
    assert records.get(3) == record(3, values[3])
    records.close()
    again = open_records(tmp_path)
    assert [again.get(i)["log_likelihood"] for i in range(20)] == values.tolist()
    assert again.get(20) is None


def test_every_record_is_on_disk_when_add_returns(tmp_path):
    records = Records(tmp_path, SETTINGS)
    records.add([record(1), record(2)])
    assert [json.loads(line)["image"] for line in records.path.read_text().splitlines()[1:]] == [1, 2]
    records.close()


def test_last_record_of_an_image_is_used(tmp_path):
    records = Records(tmp_path, SETTINGS)
    records.add([record(1, -5.0)])
    records.add([record(1, -4.0)])
    records.close()
    assert open_records(tmp_path).get(1) == record(1, -4.0)


def test_incomplete_last_line_is_dropped_and_the_file_is_continued(tmp_path):
    records = Records(tmp_path, SETTINGS)
    records.add([record(1), record(2)])
    records.close()
    records.path.write_text(records.path.read_text()[:-4])
    records = Records(tmp_path, SETTINGS)
    assert (records.get(1), records.get(2)) == (record(1), None)
    records.add([record(2, -7.0)])
    records.close()
    again = open_records(tmp_path)
    assert (again.get(1), again.get(2)) == (record(1), record(2, -7.0))


def test_invalid_line_is_dropped(tmp_path):
    records = Records(tmp_path, SETTINGS)
    records.add([record(1), record(2)])
    records.close()
    header, first, second = records.path.read_text().splitlines()
    records.path.write_text("\n".join([header, first[:5] + "\0\0", "[3]", '{"x": 1}', second]) + "\n")
    again = open_records(tmp_path)
    assert (again.get(1), again.get(2)) == (None, record(2))


def test_other_settings_have_another_file(tmp_path):
    records = Records(tmp_path, SETTINGS)
    records.add([record(1)])
    records.close()
    other = open_records(tmp_path, {**SETTINGS, "seed": 1})
    assert other.get(1) is None
    assert other.path != records.path
    assert open_records(tmp_path).get(1) == record(1)


def test_second_writer_of_the_same_settings_is_refused(tmp_path):
    first = Records(tmp_path, SETTINGS)
    with pytest.raises(UserError, match="another process is already doing this task"):
        Records(tmp_path, SETTINGS)
    first.add([record(5)])
    first.close()
    assert open_records(tmp_path).get(5) == record(5)


def test_lines_are_never_changed(tmp_path):
    """Opening the file again changes nothing, even if it contains an invalid line."""
    records = Records(tmp_path, SETTINGS)
    records.add([record(1, -5.0), record(1, -4.0)])
    records.close()
    with open(records.path, "ab") as file:
        file.write(b"\xff\xfe junk\n")
    before = records.path.read_bytes()
    assert open_records(tmp_path).get(1) == record(1, -4.0)
    assert records.path.read_bytes() == before


def test_file_cut_inside_its_first_line_is_started_again(tmp_path):
    records = Records(tmp_path, SETTINGS)
    records.close()
    records.path.write_text(records.path.read_text()[:-3])
    records = Records(tmp_path, SETTINGS)
    records.add([record(2)])
    records.close()
    assert open_records(tmp_path).get(2) == record(2)


def test_fingerprint_depends_on_the_values(rng):
    tree = {"a": rng.normal(size=(3, 4)), "b": [np.zeros(2, np.uint8)]}
    first = fingerprint(tree)
    assert first == fingerprint(tree)
    tree["b"][0][1] = 1
    assert fingerprint(tree) != first

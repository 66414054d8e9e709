"""No part of exvae imports a part above it. docs/make_imports.py lists the layers, and calls the parts rooms."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def rooms():
    spec = importlib.util.spec_from_file_location("make_imports", ROOT / "docs" / "make_imports.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_imports_upwards(rooms):
    found = rooms.imports(ROOT / "exvae")
    assert ("training", "algorithm") in found and ("algorithm", "priors") in found
    assert rooms.upward(found) == []


def test_every_room_has_a_layer(rooms):
    there = {rooms.room_of(path, ROOT / "exvae") for path in (ROOT / "exvae").rglob("*.py")}
    assert there == {room for layer in rooms.LAYERS for room in layer} | set(rooms.DOORS)


def test_upward_import_is_detected(rooms, tmp_path):
    for room, text in {
        "priors/mine.py": "def f():\n    from exvae.models import vae",
        "models/vae.py": "from exvae import run",
        "uses/new.py": "import exvae.runs.trained",
    }.items():
        (tmp_path / room).parent.mkdir()
        (tmp_path / room).write_text(text)
    assert rooms.upward(rooms.imports(tmp_path)) == ["exvae/models/vae.py imports exvae.run, which is not below models"]
    (tmp_path / "retrieval").mkdir()
    (tmp_path / "retrieval" / "bad.py").write_text("from exvae.priors import PRIORS\nfrom exvae.data import load")
    assert len(rooms.upward(rooms.imports(tmp_path))) == 3


def test_picture_equals_the_code(rooms, tmp_path):
    rooms.draw(tmp_path / "imports.svg")
    assert (tmp_path / "imports.svg").read_text() == rooms.PICTURE.read_text()

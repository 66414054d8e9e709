"""The rooms of `exvae/` in the order in which they may import each other, and docs/imports.svg made from the code.

python docs/make_imports.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "imports.svg"
# From the bottom up. A room may import rooms below it, not those beside it or above it.
LAYERS = (
    ("errors", "keys", "once"),
    ("files", "distributions", "scale"),
    ("models", "retrieval", "data"),
    ("priors", "encoding"),
    ("config", "state"),
    ("objectives",),
    ("runs",),
    ("evaluation",),
    ("uses",),
    ("training", "run"),
    ("sweeps",),
    ("reproduce",),
)
DOORS = ("tables", "results", "trials", "__init__")  # commands of a few lines, and the face of the package


def room_of(path: Path, package: Path) -> str:
    return path.relative_to(package).with_suffix("").parts[0]


def modules_imported(tree: ast.AST) -> set[str]:
    """Dotted names below `exvae` that a module imports, anywhere in it, type checking included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "exvae":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("exvae."):
            found.add(node.module.removeprefix("exvae."))
        elif isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("exvae.") for alias in node.names if alias.name.startswith("exvae.")}
    return found


def imports(package: Path) -> dict[tuple[str, str], list[str]]:
    """{(room, imported room): files that do it}, without imports inside a room."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        for module in sorted(modules_imported(ast.parse(path.read_text()))):
            other = module.split(".")[0]
            if other != room:
                found.setdefault((room, other), []).append(str(path.relative_to(package)))
    return found


def level(room: str) -> int:
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def upward(found: dict[tuple[str, str], list[str]]) -> list[str]:
    """What breaks the rule, as one line each."""
    bad = []
    for (room, other), files in found.items():
        if room not in DOORS and (other in DOORS or level(other) >= level(room)):
            bad += [f"exvae/{file} imports exvae.{other}, which is not below {room}" for file in files]
    return bad


def draw(path: Path) -> None:
    """Boxes for the rooms, lines for their imports. Lines that others imply are left out."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "exvae", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    edges = {edge for edge in imports(ROOT / "exvae") if edge[0] not in DOORS}
    below: dict[str, set[str]] = {}
    for rooms in LAYERS:
        for room in rooms:
            direct = {other for one, other in edges if one == room}
            below[room] = direct.union(*(below[other] for other in direct))
    shown = [
        (room, other)
        for room, other in sorted(edges)
        if not any(other in below[middle] for one, middle in edges if one == room)
    ]
    figure = Figure(figsize=(8, 7.5))
    axes = figure.add_axes((0, 0, 1, 1))
    places = {
        room: ((number + 1) / (len(rooms) + 1), height)
        for height, rooms in enumerate(LAYERS)
        for number, room in enumerate(rooms)
    }
    for room, other in shown:
        (x1, y1), (x2, y2) = places[room], places[other]
        arrow = {"arrowstyle": "-|>", "color": "#8a93a6", "shrinkA": 12, "shrinkB": 12, "lw": 1}
        axes.annotate("", (x2, y2), (x1, y1), arrowprops=arrow)
    for room, (x, y) in places.items():
        name = f"{room}/" if (ROOT / "exvae" / room).is_dir() else f"{room}.py"
        box = {"boxstyle": "round,pad=0.4", "facecolor": "#eef3ff", "edgecolor": "#4a6fd0"}
        axes.text(x, y, name, ha="center", va="center", fontsize=11, bbox=box)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.7, len(LAYERS) - 0.3)
    axes.axis("off")
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw(PICTURE)
    print(f"wrote {PICTURE}")

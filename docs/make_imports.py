"""The order in which the modules of `exvae/` may import each other, and docs/imports.svg, drawn from the code.

A "room" is a top-level module or package of `exvae/`.

python docs/make_imports.py
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "imports.svg"
# From the bottom up. A room may import the rooms below it, but not those beside or above it.
LAYERS = (
    ("arrays", "errors", "once"),
    ("files", "keys"),
    ("distributions", "scale"),
    ("models", "retrieval", "data"),
    ("priors", "encoding"),
    ("config", "state"),
    ("objectives",),
    ("algorithm",),
    ("runs",),
    ("evaluation",),
    ("uses",),
    ("training", "run"),
    ("sweeps",),
    ("reproduce",),
)
# Horizontal positions in the picture, chosen so that no line passes behind an unrelated room.
PLACES = {
    "arrays": 0.2, "errors": 0.4, "files": 0.5, "keys": 0.6, "once": 0.8, "distributions": 0.5, "scale": 0.82,
    "models": 0.68, "retrieval": 0.26, "data": 0.92, "priors": 0.38, "encoding": 0.84, "config": 0.16, "state": 0.56,
    "objectives": 0.72, "algorithm": 0.88, "runs": 0.36, "evaluation": 0.6, "uses": 0.5, "training": 0.38, "run": 0.72,
    "sweeps": 0.16, "reproduce": 0.56,
}  # fmt: skip
SMALL = ("arrays", "errors", "files", "keys", "once")  # every room may import them, so the picture has no lines to them
DOORS = ("huge_pages", "tables", "results", "trials", "__init__")  # modules that start a command; the public interface


def room_of(path: Path, package: Path) -> str:
    """The room of a file."""
    return path.relative_to(package).with_suffix("").parts[0]


def modules_imported(tree: ast.AST) -> set[str]:
    """The dotted names below `exvae` that a module imports anywhere, also for type checking only."""
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
    """{(room, imported room): files with this import}, without imports inside a room."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = room_of(path, package)
        for module in sorted(modules_imported(ast.parse(path.read_text()))):
            other = module.split(".")[0]
            if other != room:
                found.setdefault((room, other), []).append(str(path.relative_to(package)))
    return found


def level(room: str) -> int:
    """The layer of a room, counted from the bottom."""
    return next(number for number, rooms in enumerate(LAYERS) if room in rooms)


def upward(found: dict[tuple[str, str], list[str]]) -> list[str]:
    """The imports that break the rule, as one line of text each."""
    bad = []
    for (room, other), files in found.items():
        if room not in DOORS and (other in DOORS or level(other) >= level(room)):
            bad += [f"exvae/{file} imports exvae.{other}, which is not below {room}" for file in files]
    return bad


def draw(path: Path) -> None:
    """Draw rooms as boxes and imports as arrows. Imports that are implied by other arrows are left out."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "exvae", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    edges = {edge for edge in imports(ROOT / "exvae") if edge[0] not in DOORS and edge[1] not in SMALL}
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
    boxes = {}
    for height, rooms in enumerate(LAYERS):
        for room in rooms:
            name = f"{room}/" if (ROOT / "exvae" / room).is_dir() else f"{room}.py"
            box = {"boxstyle": "round,pad=0.4", "facecolor": "#eef3ff", "edgecolor": "#4a6fd0"}
            text = axes.text(PLACES[room], height, name, ha="center", va="center", fontsize=11, bbox=box, zorder=3)
            boxes[room] = text.get_bbox_patch()
    for room, other in shown:
        ends = {"patchA": boxes[room], "patchB": boxes[other], "shrinkA": 1, "shrinkB": 2}
        arrow = {"arrowstyle": "-|>", "color": "#8a93a6", "lw": 1, **ends}
        axes.annotate("", (PLACES[other], level(other)), (PLACES[room], level(room)), arrowprops=arrow, zorder=1)
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.7, len(LAYERS) - 0.3)
    axes.axis("off")
    figure.savefig(path, metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    draw(PICTURE)
    print(f"wrote {PICTURE}")

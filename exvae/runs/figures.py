"""Figures. Only this module uses matplotlib, and it defines all colours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image, ImageDraw, ImageFont

# Grids of images, as values in 0..1.
BORDER = 0.5  # between images: grey
GAP = 1.0  # between plates (small grids, see `save_plates`): white
MARK = (1.0, 0.55, 0.0)  # frames around source images: orange
# Colours of text and plots, by their names in PIL and matplotlib.
PAPER, INK = "white", "black"
FEW_CLASSES, MANY_CLASSES = "tab10", "nipy_spectral"  # colour maps for up to 10 labels, and for more
SERIES = tuple(f"C{number}" for number in range(10))  # lines, histograms and the legend of FEW_CLASSES

Mask = Bool[np.ndarray, "*#RC"] | bool | None  # one value for each row and column; may broadcast


def tile(images: Float[np.ndarray, "R C h w c"], marked: Mask = None) -> Float[np.ndarray, "H W 3"]:
    """Arrange images in rows and columns with thin borders. Marked images have a coloured border."""
    rows, columns, height, width, _ = images.shape
    framed = np.broadcast_to(False if marked is None else marked, (rows, columns))
    picture = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, 3), BORDER, np.float32)
    for row, column in np.ndindex(rows, columns):
        y, x = row * (height + 1), column * (width + 1)
        if framed[row, column]:
            picture[y : y + height + 2, x : x + width + 2] = MARK
        picture[y + 1 : y + 1 + height, x + 1 : x + 1 + width] = np.clip(images[row, column], 0.0, 1.0)
    return picture


def save_grid(
    path: Path,
    images: Float[np.ndarray, "R C h w c"],
    marked: Mask = None,
    scale: int = 2,
) -> None:
    """Write images with values in 0..1 as one PNG. Each pixel becomes `scale` x `scale` pixels."""
    _save(path, tile(images, marked), scale)


def save_plates(path: Path, plates: Float[np.ndarray, "P n h w c"], *, columns: int = 4, source: int = 0) -> None:
    """Write plates (small grids of n images) side by side. Mark the image with index `source` in each plate."""
    count, n = plates.shape[:2]
    marked = (np.arange(n) == source).reshape(-1, columns)
    tiles = [tile(plate.reshape(-1, columns, *plate.shape[1:]), marked) for plate in plates]
    side = math.ceil(math.sqrt(count))
    gap = 3
    height, width = (size + gap for size in tiles[0].shape[:2])
    picture = np.full((math.ceil(count / side) * height - gap, side * width - gap, 3), GAP, np.float32)
    for number, part in enumerate(tiles):
        y, x = number // side * height, number % side * width
        picture[y : y + part.shape[0], x : x + part.shape[1]] = part
    _save(path, picture, scale=2)


def save_captioned(
    path: Path,
    images: Float[np.ndarray, "n h w c"],
    captions: Sequence[str],
    *,
    columns: int,
    marked: Bool[np.ndarray, " n"] | None = None,
) -> None:
    """Write images in rows of `columns`, with a line of text below each."""
    scale, text_height = 2, 14
    height, width = ((size + 2) * scale for size in images.shape[1:3])
    rows = math.ceil(len(images) / columns)
    picture = Image.new("RGB", (columns * width, rows * (height + text_height)), PAPER)
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(10)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = number % columns * width, number // columns * (height + text_height)
        frame = marked is not None and bool(marked[number])
        picture.paste(_to_pil(tile(image[None, None], frame).repeat(scale, 0).repeat(scale, 1)), (x, y))
        draw.text((x + width / 2, y + height + text_height / 2), caption, fill=INK, font=font, anchor="mm")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, optimize=True)


def save_images(folder: Path, images: Float[np.ndarray, "n h w c"]) -> None:
    """Write every image as its own PNG: 00000.png, 00001.png, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = max(5, len(str(len(images) - 1)))
    for number, image in enumerate(images):
        _to_pil(image).save(folder / f"{number:0{digits}d}.png")


def save_scatter(path: Path, points: Float[np.ndarray, "n 2"], labels: Int[np.ndarray, " n"] | None) -> None:
    """Plot points in the plane, coloured by label."""
    figure, axes = _axes(6, 6)
    axes.set_xticks([])
    axes.set_yticks([])
    if labels is None:
        axes.scatter(*points.T, s=2, color=INK)
    else:
        classes, numbers = np.unique(labels, return_inverse=True)
        few = len(classes) <= len(SERIES)
        colours, largest = (FEW_CLASSES, len(SERIES) - 1) if few else (MANY_CLASSES, len(classes))
        axes.scatter(*points.T, s=2, c=numbers, cmap=colours, vmin=0, vmax=largest)
        if few:
            for colour, name in zip(SERIES, classes, strict=False):
                axes.scatter([], [], s=20, color=colour, label=str(name))
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    _finish(path, figure)


def save_histograms(path: Path, values: dict[str, Float[np.ndarray, " n"]], xlabel: str) -> None:
    """Plot histograms in one diagram."""
    figure, axes = _axes(6, 3.5)
    bins = np.linspace(0.0, max(float(v.max()) for v in values.values()), 60)
    for number, (name, sample) in enumerate(values.items()):
        text, colour = f"{name} (median {np.median(sample):.2f})", SERIES[number % len(SERIES)]
        axes.hist(sample, bins, histtype="step", density=True, label=text, color=colour)
    axes.set_xlabel(xlabel)
    axes.set_yticks([])
    axes.margins(y=0.35)  # space for the legend
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    _finish(path, figure)


def save_lines(
    path: Path, lines: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]], xlabel: str, ylabel: str
) -> None:
    """Plot a line for each name: x, y and half the length of the error bars of y."""
    figure, axes = _axes(5, 3.5)
    for number, (name, (x, y, error)) in enumerate(lines.items()):
        colour = SERIES[number % len(SERIES)]
        axes.errorbar(x, y, yerr=error, marker="o", markersize=3, capsize=2, label=name, color=colour)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False)
    _finish(path, figure)


def save_panels(
    path: Path, panels: Mapping[str, Mapping[str, tuple[Sequence[float], Sequence[float]]]], xlabel: str
) -> None:
    """Plot diagrams side by side with a logarithmic x. Each has a title, and a line (x, y) for each name."""
    figure, axes = _axes(3 * len(panels), 2.6, columns=len(panels))
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for one, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, (x, y) in lines.items():
            one.plot(x, y, marker="o", markersize=3, label=name, color=SERIES[names.index(name) % len(SERIES)])
        one.set_xscale("log")
        one.set_ylim(0, 1.1 * one.dataLim.ymax)
        one.set_title(title, fontsize=9)
        one.set_xlabel(xlabel)
    axes[0].legend(frameon=False, fontsize=8)
    _finish(path, figure)


def to_bytes(images: Float[np.ndarray, ...]) -> UInt8[np.ndarray, ...]:
    """Convert values in 0..1 to bytes 0..255."""
    return np.rint(np.clip(images, 0.0, 1.0) * 255).astype(np.uint8)


def _to_pil(image: Float[np.ndarray, "h w c"]) -> Image.Image:
    pixels = to_bytes(image)
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _save(path: Path, picture: Float[np.ndarray, "H W 3"], scale: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = _to_pil(picture.repeat(scale, 0).repeat(scale, 1))
    if np.ptp(np.asarray(image), axis=-1).max() == 0:
        image = image.convert("L")  # a grey file has a third of the size
    image.save(path, optimize=True)


def _axes(width: float, height: float, columns: int = 1) -> tuple[Any, Any]:
    """A new figure and its axes."""
    from matplotlib.figure import Figure  # without pyplot, which opens windows and has global state

    figure = Figure(figsize=(width, height), layout="tight")
    return figure, figure.subplots(1, columns)


def _finish(path: Path, figure: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)

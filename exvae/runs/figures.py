"""Pictures. The only module that knows matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

GREY, WHITE, MARK = 0.5, 1.0, (1.0, 0.55, 0.0)  # of borders, gaps, and the frames around source images


Mask = Bool[np.ndarray, "*#RC"] | bool | None  # over rows and columns; may broadcast


def tile(images: Float[np.ndarray, "R C h w c"], marked: Mask = None) -> Float[np.ndarray, "H W 3"]:
    """Images in rows and columns with thin borders, those of `marked` images coloured."""
    rows, columns, height, width, _ = images.shape
    marked = np.broadcast_to(False if marked is None else marked, (rows, columns))
    picture = np.full((rows * (height + 1) + 1, columns * (width + 1) + 1, 3), GREY, np.float32)
    for row, column in np.ndindex(rows, columns):
        y, x = row * (height + 1), column * (width + 1)
        if marked[row, column]:
            picture[y : y + height + 2, x : x + width + 2] = MARK
        picture[y + 1 : y + 1 + height, x + 1 : x + 1 + width] = np.clip(images[row, column], 0.0, 1.0)
    return picture


def save_grid(
    path: Path,
    images: Float[np.ndarray, "R C h w c"],
    marked: Mask = None,
    scale: int = 2,
) -> None:
    """Write images in 0..1 as one PNG, each pixel `scale` pixels wide."""
    _save(path, tile(images, marked), scale)


def save_plates(path: Path, plates: Float[np.ndarray, "P n h w c"], *, columns: int = 4, source: int = 0) -> None:
    """Plates of n images each, side by side; image number `source` of each is the one that it starts from."""
    count, n = plates.shape[:2]
    marked = (np.arange(n) == source).reshape(-1, columns)
    tiles = [tile(plate.reshape(-1, columns, *plate.shape[1:]), marked) for plate in plates]
    side = math.ceil(math.sqrt(count))
    gap = 3
    height, width = (size + gap for size in tiles[0].shape[:2])
    picture = np.full((math.ceil(count / side) * height - gap, side * width - gap, 3), WHITE, np.float32)
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
    """Images line by line, with a line of text below each."""
    from PIL import Image, ImageDraw, ImageFont

    scale, text_height = 2, 14
    height, width = ((size + 2) * scale for size in images.shape[1:3])
    rows = math.ceil(len(images) / columns)
    picture = Image.new("RGB", (columns * width, rows * (height + text_height)), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(10)
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = number % columns * width, number // columns * (height + text_height)
        frame = marked is not None and marked[number]
        picture.paste(_to_pil(tile(image[None, None], frame).repeat(scale, 0).repeat(scale, 1)), (x, y))
        draw.text((x + width / 2, y + height + text_height / 2), caption, fill="black", font=font, anchor="mm")
    path.parent.mkdir(parents=True, exist_ok=True)
    picture.save(path, optimize=True)


def save_images(folder: Path, images: Float[np.ndarray, "n h w c"]) -> None:
    """Every image as a PNG of its own: 00000.png, 00001.png, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    digits = max(5, len(str(len(images) - 1)))
    for number, image in enumerate(images):
        _to_pil(image).save(folder / f"{number:0{digits}d}.png")


def save_scatter(path: Path, points: Float[np.ndarray, "n 2"], labels: Int[np.ndarray, " n"] | None) -> None:
    """Points in the plane, coloured by label."""
    figure, axes = _axes(6, 6)
    classes = [] if labels is None else np.unique(labels)
    few = len(classes) <= 10
    colours = {"color": "black"}
    if labels is not None:
        colours = {"c": np.searchsorted(classes, labels), "cmap": "tab10" if few else "nipy_spectral", "vmin": 0}
        colours["vmax"] = 9 if few else len(classes)
    axes.scatter(*points.T, s=2, **colours)
    axes.set_xticks([])
    axes.set_yticks([])
    if labels is not None and few:
        for number, name in enumerate(classes):
            axes.scatter([], [], s=20, color=f"C{number}", label=str(name))
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    _finish(path, figure)


def save_histograms(path: Path, values: dict[str, Float[np.ndarray, " n"]], xlabel: str) -> None:
    """Distributions over each other."""
    figure, axes = _axes(6, 3.5)
    bins = np.linspace(0.0, max(float(v.max()) for v in values.values()), 60)
    for name, sample in values.items():
        axes.hist(sample, bins, histtype="step", density=True, label=f"{name} (median {np.median(sample):.2f})")
    axes.set_xlabel(xlabel)
    axes.set_yticks([])
    axes.margins(y=0.35)  # room for the legend
    axes.legend(fontsize=8, frameon=False, loc="upper left")
    _finish(path, figure)


def save_lines(
    path: Path, lines: dict[str, tuple[Sequence[float], Sequence[float], Sequence[float]]], xlabel: str, ylabel: str
) -> None:
    """A line for each name: x, y and the half length of y's error bar."""
    figure, axes = _axes(5, 3.5)
    for name, (x, y, error) in lines.items():
        axes.errorbar(x, y, yerr=error, marker="o", markersize=3, capsize=2, label=name)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend(frameon=False)
    _finish(path, figure)


def save_panels(path: Path, panels: dict[str, dict[str, tuple[Sequence[float], Sequence[float]]]], xlabel: str) -> None:
    """Axes beside each other, x logarithmic, each with a title and a line (x, y) for each name."""
    figure, axes = _axes(3 * len(panels), 2.6, columns=len(panels))
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    for one, (title, lines) in zip(axes, panels.items(), strict=True):
        for name, (x, y) in lines.items():
            one.plot(x, y, marker="o", markersize=3, label=name, color=f"C{names.index(name)}")
        one.set_xscale("log")
        one.set_ylim(0, 1.1 * one.dataLim.ymax)
        one.set_title(title, fontsize=9)
        one.set_xlabel(xlabel)
    axes[0].legend(frameon=False, fontsize=8)
    _finish(path, figure)


def to_bytes(images: Float[np.ndarray, ...]) -> UInt8[np.ndarray, ...]:
    """0..1 to 0..255."""
    return np.rint(np.clip(images, 0.0, 1.0) * 255).astype(np.uint8)


def _to_pil(image: Float[np.ndarray, "h w c"]):
    from PIL import Image

    pixels = to_bytes(image)
    return Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)


def _save(path: Path, picture: Float[np.ndarray, "H W 3"], scale: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = _to_pil(picture.repeat(scale, 0).repeat(scale, 1))
    if np.ptp(np.asarray(picture), axis=-1).max() == 0:
        picture = picture.convert("L")  # no colour in it: a third of the size
    picture.save(path, optimize=True)


def _axes(width: float, height: float, columns: int = 1):
    from matplotlib.figure import Figure  # without pyplot: no window, nothing global

    figure = Figure(figsize=(width, height), layout="tight")
    return figure, figure.subplots(1, columns)


def _finish(path: Path, figure) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)

"""`glyphs`: a seeded generator of images of characters that look handwritten.

It imitates the structure of Omniglot. An alphabet has a style. A character of it has one to four strokes that meet in
junctions. A drawer has a hand (slant, size, pen, tremor). An image shows one character, drawn once by one drawer. A
stroke is the path of a turtle: a few segments, each straight or bent, with or without a corner before it. All
computations are vectorised over characters or images.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from typing import NamedTuple

import numpy as np

from exvae.data.types import Split
from exvae.errors import UserError

SIZE = 28
NUM_ALPHABETS = 50
CHARACTERS_PER_ALPHABET = 32
NUM_CHARACTERS = NUM_ALPHABETS * CHARACTERS_PER_ALPHABET
NUM_DRAWERS = 1000
MAX_STROKES = 4

_SEGMENTS = 5  # largest number of segments in a stroke
_FINE = 64  # points along a stroke while a character is designed
_POINTS = 128  # points along a finished character, at most 0.7 pixels apart
_CANDIDATES = 8  # strokes tried for each place in a character; the least cluttered one is used
_GAP = 0.17  # strokes closer than this merge in the image
_BLOCK = 2048  # images that share a random stream; a thread uses about 50 MiB for them
_ALPHABETS, _DRAWERS, _CHARACTERS, _IMAGES = range(4)  # random streams


class _Characters(NamedTuple):
    """All characters: evenly spaced points along the strokes, in a box of about 1 x 1 around the origin, y down."""

    points: np.ndarray  # (C, T, 2)
    stroke: np.ndarray  # (C, T) int, index of the stroke that a point lies on
    position: np.ndarray  # (C, T) arc length from the stroke's start
    pivots: np.ndarray  # (C, MAX_STROKES, 2) the junction of each stroke with the earlier ones
    length: np.ndarray  # (C,) total length of all strokes


def generate(num_images: int, seed: int) -> Split:
    """Draw `num_images` images of 28 x 28 x 1. Labels number the characters; `label // 32` is the alphabet.

    The same arguments give the same images. With the same seed, a smaller set is the beginning of a larger one.
    """
    if num_images < 1:
        raise UserError(f"number of glyphs {num_images} must be 1 or more")
    if seed < 0:
        raise UserError(f"seed {seed} of the glyphs must be 0 or more")
    images = np.empty((num_images, SIZE, SIZE, 1), np.uint8)
    labels = np.empty(num_images, np.int32)
    characters, hands = _characters(seed), _hands(seed)

    def fill(start: int) -> None:
        stop = min(start + _BLOCK, num_images)
        rng = np.random.default_rng((seed, _IMAGES, start))
        images[start:stop, ..., 0], labels[start:stop] = _draw_block(rng, characters, hands, stop - start)

    with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 8)) as pool:
        list(pool.map(fill, range(0, num_images, _BLOCK)))
    return Split(images, labels)


# The design of characters.


def _styles(seed: int) -> dict[str, np.ndarray]:
    """The style of each alphabet: how its strokes are built. One row per alphabet."""
    rng = np.random.default_rng((seed, _ALPHABETS))
    a = NUM_ALPHABETS
    round_ = rng.beta(0.7, 0.7, a)  # 0: runes, 1: round letters; most alphabets are near one of the two
    return {
        "arc": 0.08 + 0.8 * round_,  # probability that a segment is bent
        "corner": 0.85 - 0.6 * round_,  # probability of a corner before a segment
        "loop": rng.uniform(0.0, 0.35, a) * round_,  # probability that a bent segment closes a loop
        "segments": rng.uniform(1.6, 3.4, a),
        "strokes": rng.uniform(1.4, 3.2, a),
        "radius": rng.uniform(0.2, 0.34, a),
        "dot": rng.uniform(0.0, 0.35, a) ** 2,
        "bar": np.where(rng.random(a) < 0.2, 0.5, 0.04),  # probability of a horizontal stroke on top, as in Devanagari
        "diagonal": rng.uniform(0.0, 0.6, a),
    }


@functools.lru_cache(maxsize=4)
def _characters(seed: int) -> _Characters:
    """Design all characters, stroke by stroke."""
    rng = np.random.default_rng((seed, _CHARACTERS))
    style = {name: np.repeat(value, CHARACTERS_PER_ALPHABET) for name, value in _styles(seed).items()}
    c = NUM_CHARACTERS
    num_strokes = np.clip(np.round(rng.normal(style["strokes"], 0.8)), 1, MAX_STROKES).astype(int)
    paths = np.zeros((c, MAX_STROKES, _FINE, 2))
    lengths = np.zeros((c, MAX_STROKES))
    pivots = np.zeros((c, MAX_STROKES, 2))
    rows = np.arange(c)
    for s in range(MAX_STROKES):
        path, length = _strokes(rng, style, first=s == 0)  # (C, K, F, 2), (C, K)
        pivot = np.zeros((c, _CANDIDATES, 2)) if s == 0 else _junctions(rng, paths[:, :s])
        path += (pivot - _anchors(rng, path))[:, :, None]
        best = np.argmin(_clutter(path, length, paths[:, :s]), axis=1)
        used = s < num_strokes
        paths[:, s], pivots[:, s] = path[rows, best], pivot[rows, best]
        lengths[:, s] = np.where(used, length[rows, best], 0.0)
        paths[~used, s] = paths[~used, 0]  # an unused stroke must not affect the box or the junctions
    return _resample(*_fit(paths, lengths, pivots))


def _strokes(rng: np.random.Generator, style: dict[str, np.ndarray], first: bool) -> tuple[np.ndarray, np.ndarray]:
    """Candidates for one stroke of every character: paths (C, K, F, 2) from the origin, and lengths (C, K)."""
    shape = (NUM_CHARACTERS, _CANDIDATES, _SEGMENTS)
    per = {name: value[:, None, None] for name, value in style.items()}
    mean_segments = per["segments"] * (1.0 if first else 0.6)  # later strokes are simpler, as in real scripts
    count = np.clip(np.round(rng.normal(mean_segments, 0.8, (*shape[:2], 1))), 1, _SEGMENTS)
    bent = rng.random(shape) < per["arc"]
    loop = bent & (rng.random(shape) < per["loop"])
    turn = np.deg2rad(rng.choice([60, 90, 120, 180, 180, 240], shape) + rng.normal(0, 8, shape))
    turn = np.where(loop, np.deg2rad(rng.uniform(330, 400, shape)), turn) * bent
    turn *= np.where(rng.random((*shape[:2], 1)) < 0.5, 1, -1) * np.where(rng.random(shape) < 0.25, -1, 1)
    radius = per["radius"] * rng.choice([0.7, 1.0, 1.4], shape) * np.where(loop, 0.6, 1.0)
    straight = rng.choice([0.35, 0.55, 0.9], shape) * rng.uniform(0.9, 1.1, shape)
    length = np.where(bent, radius * np.abs(turn), straight)
    corner = np.deg2rad(rng.choice([45, 60, 90, 90, 90, 90, 120], shape) * rng.choice([-1, 1], shape))
    # Two straight segments always meet in a corner; otherwise they would be one segment.
    two_straight = ~bent & np.concatenate([np.zeros_like(bent[..., :1]), ~bent[..., :-1]], axis=-1)
    corner *= two_straight | (rng.random(shape) < per["corner"])
    heading = rng.choice([90, 90, 90, 0, 0, 180], shape[:2])  # strokes mostly start downwards or sideways
    heading = heading + np.where(
        rng.random(shape[:2]) < style["diagonal"][:, None], rng.choice([-45, 45, 30], shape[:2]), 0
    )
    corner[..., 0] = np.deg2rad(heading + rng.normal(0, 5, shape[:2]))
    used = np.arange(_SEGMENTS) < count
    if not first:
        _make_dots_and_bars(rng, style, used=used, turn=turn, length=length, corner=corner)
    return _turtle(np.where(used, length, 0.0), turn * used, corner * used)


def _make_dots_and_bars(
    rng: np.random.Generator,
    style: dict[str, np.ndarray],
    *,
    used: np.ndarray,
    turn: np.ndarray,
    length: np.ndarray,
    corner: np.ndarray,
) -> None:
    """Change the candidates of some characters, in place, into a dot (a tiny circle) or a horizontal bar."""
    kind = rng.random(NUM_CHARACTERS)
    dot = kind < style["dot"]
    bar = ~dot & (kind < style["dot"] + style["bar"])
    used[dot | bar] = np.arange(_SEGMENTS) == 0
    turn[dot, :, 0], length[dot, :, 0] = 2 * np.pi, 2 * np.pi * 0.035
    turn[bar, :, 0], length[bar, :, 0], corner[bar, :, 0] = 0.0, rng.uniform(0.6, 1.2, (bar.sum(), _CANDIDATES)), 0.0


def _turtle(length: np.ndarray, turn: np.ndarray, corner: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walk the segments (..., G): heading(s) = sum_g corner_g [s >= start_g] + turn_g * (part of segment g walked)."""
    total = length.sum(-1)
    start = np.cumsum(length, -1) - length
    s = (np.arange(_FINE) + 0.5) / _FINE * total[..., None]  # (..., F)
    heading = np.zeros_like(s)
    for g in range(length.shape[-1]):
        walked = s - start[..., g, None]
        part = np.clip(walked / np.maximum(length[..., g, None], 1e-6), 0.0, 1.0)
        heading += corner[..., g, None] * (walked >= 0) + turn[..., g, None] * part
    steps = np.stack([np.cos(heading), np.sin(heading)], -1) * (total / _FINE)[..., None, None]
    return np.cumsum(steps, -2), total


def _junctions(rng: np.random.Generator, earlier: np.ndarray) -> np.ndarray:
    """A place (C, K, 2) on an earlier stroke: mostly its start, end or middle, sometimes a little beside it."""
    c, k = NUM_CHARACTERS, _CANDIDATES
    which = rng.integers(earlier.shape[1], size=(c, k))
    where = rng.choice([0, 0, _FINE // 4, _FINE // 2, _FINE // 2, 3 * _FINE // 4, _FINE - 1, _FINE - 1], (c, k))
    place = earlier[np.arange(c)[:, None], which, where]
    apart = rng.random((c, 1, 1)) < 0.15
    return place + apart * rng.choice([-0.3, 0.3], (c, k, 2)) * rng.uniform(0.5, 1.2, (c, k, 2))


def _anchors(rng: np.random.Generator, path: np.ndarray) -> np.ndarray:
    """The point (C, K, 2) of a new stroke that is placed on the junction: start, middle (a crossing) or end."""
    c, k = path.shape[:2]
    index = rng.choice([0, _FINE // 2, _FINE // 3, _FINE - 1], (c, k), p=[0.6, 0.2, 0.1, 0.1])
    return path[np.arange(c)[:, None], np.arange(k), index]


def _clutter(path: np.ndarray, length: np.ndarray, earlier: np.ndarray) -> np.ndarray:
    """A penalty (C, K) for candidates that run into themselves or into earlier strokes, or that are too large."""
    own = path[:, :, 2::4].astype(np.float32)  # (C, K, P, 2)
    others = earlier[:, None, :, 2::4].reshape(len(path), 1, -1, 2).astype(np.float32)
    step = length / own.shape[2]
    touching = np.zeros(own.shape[:3], bool)
    for j in range(others.shape[2]):
        touching |= _near(own, others[:, :, j, None])
    for lag in range(1, own.shape[2]):
        far_along = (lag * step > 2.5 * _GAP)[..., None]
        touching[:, :, lag:] |= _near(own[:, :, lag:], own[:, :, :-lag]) & far_along
    low, high = own.min(2), own.max(2)
    if others.size:
        low, high = np.minimum(low, others.min(2)), np.maximum(high, others.max(2))
    # The margin of 3 lets a junction or a closed loop cost nothing.
    overlap = np.maximum(touching.sum(-1) * step / _GAP - 3.0, 0.0)
    return overlap + 4 * np.maximum((high - low).max(-1) - 1.2, 0.0)


def _near(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.square(a[..., 0] - b[..., 0]) + np.square(a[..., 1] - b[..., 1]) < _GAP**2


def _fit(paths: np.ndarray, lengths: np.ndarray, pivots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Centre every character and scale it towards a box of 1 x 1. Small characters stay a little smaller."""
    low, high = paths.min((1, 2)), paths.max((1, 2))
    centre = ((low + high) / 2)[:, None]
    scale = np.clip(1.0 / (high - low).max(-1), 0.4, 1.8) ** 0.9
    return (
        (paths - centre[:, None]) * scale[:, None, None, None],
        lengths * scale[:, None],
        (pivots - centre) * scale[:, None, None],
    )


def _resample(paths: np.ndarray, lengths: np.ndarray, pivots: np.ndarray) -> _Characters:
    """Distribute the points of a character over its strokes in proportion to their lengths."""
    ends = np.cumsum(lengths, 1)
    total = ends[:, -1]
    s = (np.arange(_POINTS) + 0.5) / _POINTS * total[:, None]  # (C, T)
    stroke = (s[:, :, None] >= ends[:, None, :-1]).sum(-1)
    rows = np.arange(len(paths))[:, None]
    position = s - (ends - lengths)[rows, stroke]
    fine = position / np.maximum(lengths[rows, stroke], 1e-6) * (_FINE - 1)
    low = np.clip(fine.astype(int), 0, _FINE - 2)
    part = (fine - low)[..., None]
    points = paths[rows, stroke, low] * (1 - part) + paths[rows, stroke, low + 1] * part
    as_float = (a.astype(np.float32) for a in (points, position, pivots, total))
    points, position, pivots, total = as_float
    return _Characters(points, stroke, position, pivots, total)


# The drawing of images.


@functools.lru_cache(maxsize=4)
def _hands(seed: int) -> dict[str, np.ndarray]:
    """The handwriting of each drawer, the same in all of the drawer's images. One row per drawer."""
    rng = np.random.default_rng((seed, _DRAWERS))
    d = NUM_DRAWERS
    hands = {
        "slant": rng.normal(-0.04, 0.12, d),
        "scale": 16.0 * np.exp(rng.normal(0.0, 0.17, d)),  # pixels
        "stretch": np.exp(rng.normal(0.0, 0.09, d)),  # width over height
        "care": np.exp(rng.normal(0.0, 0.35, d)),  # how much a drawing differs from the design
        "tremor": 0.012 * np.exp(rng.normal(0.0, 0.5, d)),
        "pen": rng.uniform(0.13, 0.19, d),  # fraction of the ink that spreads to each side
        "ink": rng.uniform(3.0, 3.8, d),
    }
    return {name: value.astype(np.float32) for name, value in hands.items()}


def _draw_block(
    rng: np.random.Generator, characters: _Characters, hands: dict[str, np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first `count` images of a block. The random numbers do not depend on `count`."""
    labels = rng.integers(NUM_CHARACTERS, size=_BLOCK)
    drawers = rng.integers(NUM_DRAWERS, size=_BLOCK)
    normal = rng.standard_normal((_BLOCK, 20 + 12 * MAX_STROKES), np.float32)[:count]
    labels, drawers = labels[:count], drawers[:count]
    hand = {name: value[drawers] for name, value in hands.items()}
    x, y = _write(normal, characters, labels, hand)
    ink = characters.length[labels] * hand["scale"] / _POINTS  # length of line per point, in pixels
    return _render(x, y, ink, hand["pen"], hand["ink"]), labels.astype(np.int32)


def _write(
    normal: np.ndarray, characters: _Characters, labels: np.ndarray, hand: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """The path of the pen in pixels: x and y of (count, T), from the standard normal numbers of each image."""
    care = hand["care"][:, None]
    x, y = characters.points[labels, :, 0], characters.points[labels, :, 1]
    stroke, position = characters.stroke[labels], characters.position[labels]
    rows = np.arange(len(labels))[:, None]
    whole, strokes = normal[:, :20], normal[:, 20:].reshape(len(labels), 12, MAX_STROKES)

    # Rotate, scale and move each stroke a little around its junction: in handwriting, strokes only nearly meet.
    pivot_x, pivot_y = characters.pivots[labels, :, 0][rows, stroke], characters.pivots[labels, :, 1][rows, stroke]
    matrix = [(0.06 * care * strokes[:, i])[rows, stroke] for i in range(4)]
    shift = [(0.015 * care * strokes[:, i])[rows, stroke] for i in (4, 5)]
    dx, dy = x - pivot_x, y - pivot_y
    x, y = x + matrix[0] * dx + matrix[1] * dy + shift[0], y + matrix[2] * dx + matrix[3] * dy + shift[1]

    # Deform the whole character smoothly, so strokes that meet stay together.
    bend = [0.11 * care * whole[:, i, None] for i in range(8)]
    xx, xy, yy = x * x, x * y, y * y
    x, y = (
        x + bend[0] * xx + bend[1] * xy + bend[2] * yy + bend[3] * xy * y,
        y + bend[4] * xx + bend[5] * xy + bend[6] * yy + bend[7] * xy * x,
    )

    # Tremor: two slow waves along each stroke.
    for wave, pace in enumerate((9.0, 21.0)):
        size = hand["tremor"][:, None] / (1 + wave)
        phase = (3.0 * strokes[:, 6 + 2 * wave])[rows, stroke]
        phase = phase + pace * (1 + 0.15 * whole[:, 8 + wave, None]) * position
        x, y = x + size * np.sin(phase), y + size * np.cos(1.3 * phase + whole[:, 10 + wave, None])

    scale = hand["scale"] * np.exp(0.07 * whole[:, 12])
    slant = hand["slant"] + 0.05 * whole[:, 13]
    stretch = np.sqrt(hand["stretch"]) * np.exp(0.05 * whole[:, 14])
    lean = (0.05 * whole[:, 15])[:, None]
    x, y = (x + slant[:, None] * -y) * stretch[:, None], (y + lean * x) / stretch[:, None]
    return _on_paper(x * scale[:, None], whole[:, 16]), _on_paper(y * scale[:, None], whole[:, 17])


def _on_paper(pixels: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Place one coordinate (count, T) near the middle of the image, moved or shrunk if it would cross the edge."""
    low, high = pixels.min(1), pixels.max(1)
    shrink = np.minimum(1.0, (SIZE - 4) / (high - low))
    margin = ((SIZE - 3) - shrink * (high - low)) / 2
    offset = (SIZE - 1) / 2 + np.clip(1.3 * normal, -margin, margin)
    return offset[:, None] + shrink[:, None] * (pixels - ((low + high) / 2)[:, None])


def _render(x: np.ndarray, y: np.ndarray, ink: np.ndarray, pen: np.ndarray, contrast: np.ndarray) -> np.ndarray:
    """Draw antialiased lines (count, 28, 28) uint8. Each point inks 4 pixels, then the ink is blurred and saturates."""
    count = len(x)
    left, top = x.astype(np.int32), y.astype(np.int32)
    right_part, low_part = x - left, y - top
    pixel = (np.arange(count, dtype=np.int32) * SIZE**2)[:, None] + top * SIZE + left
    low_ink, top_ink = ink[:, None] * low_part, ink[:, None] * (1 - low_part)
    corners = (
        (0, top_ink * (1 - right_part)),
        (1, top_ink * right_part),
        (SIZE, low_ink * (1 - right_part)),
        (SIZE + 1, low_ink * right_part),
    )
    flat = np.zeros(count * SIZE**2, np.float32)
    for offset, share in corners:
        flat += np.bincount((pixel + offset).ravel(), share.ravel(), count * SIZE**2)
    side = pen[:, None, None]
    image = _spread(flat.reshape(count, SIZE, SIZE), side)
    image = _spread(image.swapaxes(1, 2), side).swapaxes(1, 2)
    grey = np.tanh(np.maximum(contrast[:, None, None] * image - 0.3, 0.0))
    return np.minimum(260 * grey, 255).astype(np.uint8)


def _spread(image: np.ndarray, side: np.ndarray) -> np.ndarray:
    """Blur rows with the kernel (side, 1 - 2 side, side)."""
    out = (1 - 2 * side) * image
    out[:, 1:] += side * image[:, :-1]
    out[:, :-1] += side * image[:, 1:]
    return out

"""Time of every convolution of the convolutional architectures on a CPU, and its rounding.

python -m benchmarks.conv [--architectures=convhvae,pixelsnail,celeba] [--out=FILE.json]

For each layer there are these variants: the way that `models.conv_cpu` chooses, patches of the images, XLA's
convolution, a matrix product with as many operations, PyTorch's convolution if it is installed, and, where Winograd is
chosen for kernels up to 3x3, tiles of 4x4 instead of 2x2 results.
They alternate in one run. The batch has 100 images. Times are medians of the forward pass, and of both passes; the
first layer of an encoder has no gradient of the images. Errors are root mean squares relative to the result in float64.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.flops import square_product
from benchmarks.loop import EXPERIMENTS, TRAINING_SETS
from exvae import config as configs
from exvae import models
from exvae.models import conv, conv_cpu
from exvae.models.conv_cpu import Layer, Padding

ARCHITECTURES = flags.DEFINE_list("architectures", ["convhvae", "pixelsnail", "celeba"], "architectures to measure")
SECONDS = flags.DEFINE_float("seconds", 1.0, "time for each variant of a layer; each has at least three calls")
BATCH = flags.DEFINE_integer("batch", 100, "number of images")
OUT = flags.DEFINE_string("out", "", "also write the rows to this JSON file")

Run = Callable[[], Any]


class Shape(NamedTuple):
    """A convolution without its values."""

    image: tuple[int, ...]  # (H, W, C)
    kernel: tuple[int, ...]  # (k, l, C, F)
    stride: int
    padding: Padding
    first: bool  # its input is the image, which needs no gradient

    def describe(self) -> str:
        """Return the sizes, such as 28x28x64, 3x3 -> 128."""
        (height, width, channels), (k, l, _, features) = self.image, self.kernel  # noqa: E741
        stride = f" / {self.stride}" if self.stride > 1 else ""
        return f"{height}x{width}x{channels}, {k}x{l}{stride} -> {features}"

    @property
    def output(self) -> tuple[int, int, int]:
        """The shape of a result."""
        kernel = jax.ShapeDtypeStruct(self.kernel, jnp.float32)
        return *conv_cpu.output_size(self.image, kernel, self.stride, self.padding), self.kernel[-1]

    def gflop(self, num_images: int) -> float:
        """The GFLOP of a forward pass, also of masked weights."""
        return 2 * num_images * np.prod(self.output) * np.prod(self.kernel[:3]) / 1e9


def shapes(architecture: str) -> dict[Shape, int]:
    """All convolutions of a training step, and how often each one occurs. 1x1 convolutions are plain products."""
    config = EXPERIMENTS[architecture].get_config()
    num_train, *image_shape = TRAINING_SETS[config.data.name]
    config = configs.resolve(config, num_train)
    model = models.build(config.model, tuple(image_shape))
    found: dict[Shape, int] = {}
    images: list[jax.Array] = []

    def record(layers: Sequence[Layer], x: jax.Array) -> jax.Array:
        first, image = x is images[0], jax.ShapeDtypeStruct(x.shape, x.dtype)
        for layer in layers:
            shape = Shape(image.shape[1:], layer.kernel.shape, layer.stride, layer.padding, first)
            if layer.kernel.shape[:2] != (1, 1):
                found[shape] = found.get(shape, 0) + 1
            first, image = False, layer.output(image)
        return jnp.zeros(image.shape)

    def terms(whole: dict, x: jax.Array) -> Any:
        images.append(x)
        return models.apply(model, whole, jax.random.key(0), x, method="terms")

    params, statistics = jax.eval_shape(lambda: models.init(jax.random.key(0), model))
    x = jax.ShapeDtypeStruct((1, *image_shape), jnp.float32)
    with mock.patch.object(conv, "convolve", record):
        jax.eval_shape(terms, {"model": params, **statistics}, x)
    return found


class Arrays(NamedTuple):
    """The arrays of a convolution: images, kernel, and a gradient of the result."""

    x: jax.Array
    kernel: jax.Array
    dy: jax.Array


def arrays(shape: Shape, num_images: int) -> Arrays:
    """Random values with the scale of a trained network."""
    rng = np.random.default_rng(0)
    draw = lambda *sizes: rng.normal(size=sizes).astype(np.float32)  # noqa: E731
    kernel = draw(*shape.kernel) / np.sqrt(np.prod(shape.kernel[:3]))
    values = draw(num_images, *shape.image), kernel, draw(num_images, *shape.output)
    return Arrays(*map(jnp.asarray, values))


@contextlib.contextmanager
def larger_tiles() -> Iterator[None]:
    """Winograd with tiles of 4x4 results."""
    conv_cpu.transform.cache_clear()
    with mock.patch.object(conv_cpu, "TILE", 4):
        yield
    conv_cpu.transform.cache_clear()


CHANGES = {
    "ours": contextlib.nullcontext,
    "patches": lambda: mock.patch.object(conv_cpu, "_choose", conv_cpu.input_patches),
    "tiles4": larger_tiles,
}


def forward_of(shape: Shape) -> dict[str, Callable]:
    """The functions (x, kernel) -> result that are compared."""

    def layer(kernel: jax.Array) -> Layer:
        return Layer(kernel, None, shape.stride, shape.padding, None)

    found = {name: lambda x, kernel: conv_cpu.convolve([layer(kernel)], x) for name in CHANGES}
    small = min(shape.output[:2]) <= conv_cpu.SMALL or min(shape.kernel[2:]) < conv_cpu.MANY_CHANNELS
    if shape.stride > 1 or max(shape.kernel[:2]) > 3 or small:  # Winograd is not chosen, or has no points
        del found["tiles4"]
    return {**found, "lax": lambda x, kernel: conv.plain([layer(kernel)], x)}


def with_gradients(name: str, forward: Callable, first: bool) -> Callable:
    """Make (x, kernel, dy) -> the result and the gradients that training needs."""

    def both(x: jax.Array, kernel: jax.Array, dy: jax.Array) -> Any:
        with CHANGES.get(name, contextlib.nullcontext)():
            if first:
                y, pull = jax.vjp(lambda kernel: forward(x, kernel), kernel)
            else:
                y, pull = jax.vjp(forward, x, kernel)
            return y, pull(dy)

    return both


def variants(shape: Shape, num_images: int) -> dict[str, tuple[Run, Run]]:
    """For each variant a forward pass, and both passes."""
    x, kernel, dy = arrays(shape, num_images)
    rows = jnp.ones((num_images * shape.output[0] * shape.output[1], int(np.prod(shape.kernel[:3]))))
    inputs = {name: (forward, x, kernel, dy) for name, forward in forward_of(shape).items()}
    inputs["product"] = (jnp.matmul, rows, kernel.reshape(-1, shape.kernel[-1]), dy.reshape(-1, shape.kernel[-1]))
    runs = {name: _jax_runs(name, *values, first=shape.first) for name, values in inputs.items()}
    if importlib.util.find_spec("torch"):
        runs["torch"] = _torch_runs(shape, x, kernel, dy)
    return runs


def _jax_runs(
    name: str, forward: Callable, x: jax.Array, kernel: jax.Array, dy: jax.Array, *, first: bool
) -> tuple[Run, Run]:
    def changed(x: jax.Array, kernel: jax.Array) -> jax.Array:
        with CHANGES.get(name, contextlib.nullcontext)():
            return forward(x, kernel)

    once, both = jax.jit(changed), jax.jit(with_gradients(name, forward, first))
    return lambda: jax.block_until_ready(once(x, kernel)), lambda: jax.block_until_ready(both(x, kernel, dy))


def _torch_runs(shape: Shape, *values: jax.Array) -> tuple[Run, Run]:
    """PyTorch's convolution with NCHW images. Borders that are not symmetric are part of the image."""
    import torch

    (top, bottom), (left, right) = shape.padding
    x, kernel, dy = (torch.from_numpy(np.array(value)) for value in values)
    x = torch.nn.functional.pad(x.permute(0, 3, 1, 2), (left, right, top, bottom)).contiguous()
    kernel, dy = kernel.permute(3, 2, 0, 1).contiguous().requires_grad_(), dy.permute(0, 3, 1, 2).contiguous()
    x.requires_grad_(not shape.first)

    def once() -> None:
        with torch.no_grad():
            torch.nn.functional.conv2d(x, kernel, stride=shape.stride)

    def both() -> None:
        x.grad = kernel.grad = None
        torch.nn.functional.conv2d(x, kernel, stride=shape.stride).backward(dy)

    return once, both


def measure(runs: dict[str, tuple[Run, Run]], seconds: float) -> dict[str, tuple[float, float]]:
    """The median seconds of a forward pass and of both passes. The variants alternate."""
    times: dict[tuple[str, int], list[float]] = {(name, part): [] for name in runs for part in (0, 1)}
    for name, part in times:
        runs[name][part]()  # compiles
    while waiting := [key for key, spent in times.items() if len(spent) < 3 or sum(spent) < seconds / 2]:
        for name, part in waiting:
            began = time.perf_counter()
            runs[name][part]()
            times[name, part].append(time.perf_counter() - began)
    return {name: (statistics.median(times[name, 0]), statistics.median(times[name, 1])) for name in runs}


def errors(shape: Shape) -> dict[str, float]:
    """The relative error of each variant's result and of its gradient of the kernel, of a few images."""
    values = arrays(shape, 4)
    forward = forward_of(shape)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(value, np.float64)) for value in values]
        exact, (*_, exact_gradient) = jax.jit(with_gradients("lax", forward["lax"], shape.first))(*wide)
    found = {}
    for name, function in forward.items():
        y, (*_, gradient) = jax.jit(with_gradients(name, function, shape.first))(*values)
        found[f"{name}_error"] = _relative(y, exact)
        found[f"{name}_gradient_error"] = _relative(gradient, exact_gradient)
    return found


def _relative(value: jax.Array, exact: jax.Array) -> float:
    wide, exact = np.asarray(value, np.float64), np.asarray(exact, np.float64)
    return float(f"{np.sqrt(np.mean((wide - exact) ** 2) / np.mean(exact**2)):.3g}")


def row(architecture: str, shape: Shape, times_used: int) -> dict[str, Any]:
    """Measure one layer."""
    num_images = BATCH.value
    gflop, passes = shape.gflop(num_images), 2 if shape.first else 3
    found: dict[str, Any] = {"architecture": architecture, "layer": shape.describe(), "times": times_used}
    found["gflop"] = round(gflop, 3)
    for name, (once, both) in measure(variants(shape, num_images), SECONDS.value).items():
        found |= {f"{name}_forward_ms": round(1e3 * once, 2), f"{name}_ms": round(1e3 * both, 2)}
        found |= {f"{name}_forward_gflops": round(gflop / once, 1), f"{name}_gflops": round(passes * gflop / both, 1)}
    return found | errors(shape)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print GFLOP/s of both passes, and the errors."""
    names = [name for name in ("ours", "patches", "tiles4", "lax", "torch", "product")]
    print(
        f"{'GFLOP/s of forward and backward pass':48}"
        + "".join(f"{name:>10}" for name in names)
        + "   error of ours, patches"
    )
    for found in rows:
        label = f"{found['architecture']:11} {found['times']} x {found['layer']}"
        rates = "".join(f"{found.get(f'{name}_gflops', 0):10.0f}" for name in names)
        print(f"{label:48}{rates}   {found['ours_error']:.1e} {found['patches_error']:.1e}")


def main(argv: list[str]) -> None:
    del argv
    product, gflop = square_product()
    rows = []
    for architecture in ARCHITECTURES.value:
        rows += [row(architecture, shape, times_used) for shape, times_used in shapes(architecture).items()]
    times = []
    for _ in range(50):
        began = time.perf_counter()
        product()
        times.append(time.perf_counter() - began)
    show(rows)
    rate = gflop / statistics.median(times)
    print(f"matrix product of 1024 x 1024: {rate:.0f} GFLOP/s")
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump({"matmul_gflops": round(rate), "batch": BATCH.value, "layers": rows}, file, indent=2)


if __name__ == "__main__":
    app.run(main)

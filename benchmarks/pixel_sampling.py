"""Time to draw PixelSNAIL digits: with cached activations, and with the whole network for every pixel.

python -m benchmarks.pixel_sampling [--pixels=20] [--out=FILE.json]

cached:         one compiled call of `decode`, which computes nothing twice
compiled loop:  one compiled loop that runs the whole network on the whole images for each pixel
python loop:    a Python loop that calls the compiled network for each pixel

All use the same latents and the same uniform random numbers. They alternate, because the speed of a shared machine
varies. Times are medians. The two loops are timed only on the first --pixels (0: all), and their times are scaled,
because all their passes cost the same. The weights are not trained, because the time does not depend on them.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import linen as nn
from jax import lax

from benchmarks.flops import drawing_flops, square_product
from experiments import mnist_pixelsnail
from exvae import models

IMAGES = flags.DEFINE_integer("images", 16, "digits to draw")
PIXELS = flags.DEFINE_integer("pixels", 20, "pixels that the naive loops draw; 0: all")
CHANNELS = flags.DEFINE_integer("channels", 0, "channels of the decoder; 0: those of the experiment")
REPEATS = flags.DEFINE_integer("repeats", 5, "measurements of each sampler")
OUT = flags.DEFINE_string("out", "", "also write the figures to this JSON file")
IMAGE_SHAPE = (28, 28, 1)
NEAR = 1e-4  # tolerance for a mean computed in two ways; a pixel with u this close to its mean may flip


class Problem(NamedTuple):
    """The inputs of all samplers."""

    model: nn.Module
    params: dict
    key: jax.Array
    z: jax.Array  # (B, D)
    latents: tuple[jax.Array, ...]  # as `decode` draws them with the key
    u: jax.Array  # (B, H, W, C), the uniform numbers of `decode`


@dataclasses.dataclass
class Sampler:
    """One way to draw images, and its measured times."""

    name: str
    pixels: int  # number of pixels that it draws
    run: Callable[[], Any]
    gflop: float  # for all pixels
    times: list[float] = dataclasses.field(default_factory=list)

    def measure(self) -> None:
        """Time one call."""
        began = time.perf_counter()
        jax.block_until_ready(self.run())
        self.times.append(time.perf_counter() - began)

    def seconds(self, num_pixels: int) -> float:
        """The median time, scaled to this number of pixels."""
        return statistics.median(self.times) * num_pixels / self.pixels


def make_problem() -> Problem:
    """Initialise the network of the experiment, and draw latents and uniform numbers."""
    config = mnist_pixelsnail.get_config("")
    config.model.channels = CHANNELS.value or config.model.channels
    model = models.build(config.model, IMAGE_SHAPE)
    key_params, key_z, key = jax.random.split(jax.random.key(0), 3)
    params, of_batches = jax.jit(lambda: models.init(key_params, model))()
    params = {"model": params, **of_batches}
    z = jax.random.normal(key_z, (IMAGES.value, config.model.latent_dim))
    key_latents, key_pixels = jax.random.split(key)  # as in `decode`
    latents = jax.jit(lambda: models.apply(model, params, key_latents, z, method="complete"))()
    u = jax.random.uniform(key_pixels, (IMAGES.value, *IMAGE_SHAPE))
    return Problem(model, params, key, z, latents, u)


def cached(problem: Problem, *, draw: bool = True) -> Callable[[], jax.Array]:
    """Return the cached sampler. If `draw` is False, it returns the means of the pixels."""
    decode = jax.jit(lambda params, key, z: models.apply(problem.model, params, key, z, draw, method="decode"))
    return lambda: decode(problem.params, problem.key, problem.z)


def whole_network(problem: Problem) -> Callable[..., jax.Array]:
    """Return the function (params, images, latents) -> means of all pixels, each given the pixels before it."""

    def means(params: dict, x: jax.Array, latents: tuple[jax.Array, ...]) -> jax.Array:
        return jax.nn.sigmoid(models.apply(problem.model, params, x, *latents, method="logits"))

    return means


def compiled_loop(problem: Problem, num_pixels: int) -> Callable[[], jax.Array]:
    """Return the sampler with a compiled loop over the first pixels."""
    means = whole_network(problem)

    @jax.jit
    def draw(params: dict, latents: tuple[jax.Array, ...], u: jax.Array, num_pixels: int) -> jax.Array:
        def draw_next(number: jax.Array, x: jax.Array) -> jax.Array:
            row, column = jnp.divmod(number, u.shape[2])
            drawn = (u < means(params, x, latents)).astype(x.dtype)
            return x.at[:, row, column].set(drawn[:, row, column])

        return lax.fori_loop(0, num_pixels, draw_next, jnp.zeros_like(u))

    return lambda: draw(problem.params, problem.latents, problem.u, num_pixels)


def python_loop(problem: Problem, num_pixels: int) -> Callable[[], np.ndarray]:
    """Return the sampler with a Python loop over the first pixels."""
    means, u = jax.jit(whole_network(problem)), np.asarray(problem.u)

    def draw() -> np.ndarray:
        x = np.zeros_like(u)
        for number in range(num_pixels):
            row, column = divmod(number, u.shape[2])
            mean = np.asarray(means(problem.params, x, problem.latents))
            x[:, row, column] = u[:, row, column] < mean[:, row, column]
        return x

    return draw


def check_cached(problem: Problem, drawn: np.ndarray) -> float:
    """Compare the cached images with one pass of the network over them. Return the largest difference of a mean."""
    means = np.asarray(jax.jit(whole_network(problem))(problem.params, drawn, problem.latents))
    largest = np.abs(means - np.asarray(cached(problem, draw=False)())).max()
    if largest > NEAR:
        raise AssertionError(f"means of cached drawing differ by {largest:.1e} from those of one pass")
    u = np.asarray(problem.u)
    wrong = (drawn != (u < means)) & (np.abs(u - means) > NEAR)
    if wrong.any():
        raise AssertionError(f"{wrong.sum()} of {wrong.size} pixels were not drawn from their mean")
    return float(largest)


def equal_images(problem: Problem, drawn: np.ndarray, reference: np.ndarray, num_pixels: int, name: str) -> float:
    """The fraction of images with the same first pixels. Others must first differ where u is close to the mean."""
    flat, expected = (a.reshape(len(a), -1)[:, :num_pixels] for a in (drawn, reference))
    differs = flat != expected
    bad = np.flatnonzero(differs.any(axis=1))
    if len(bad):
        means = jax.jit(whole_network(problem))(problem.params, reference, problem.latents)
        distance = np.abs(np.asarray(problem.u - means)).reshape(len(drawn), -1)
        first = differs[bad].argmax(axis=1)
        if (farthest := distance[bad, first].max()) > NEAR:
            raise AssertionError(f"{name} and cached draw different pixels where u is {farthest:.1e} from the mean")
    return 1 - len(bad) / len(drawn)


def figures(samplers: list[Sampler], agreement: dict[str, float], rate: float, num_pixels: int) -> list[dict[str, Any]]:
    """The rows of the table."""
    first = samplers[0].seconds(num_pixels)
    return [
        {
            "sampler": sampler.name,
            "pixels_timed": sampler.pixels,
            "seconds": sampler.seconds(num_pixels),
            "ratio": sampler.seconds(num_pixels) / first,
            "gflop": sampler.gflop,
            "matmul_fraction": sampler.gflop / sampler.seconds(num_pixels) / rate,
            "equal_images": agreement[sampler.name],
        }
        for sampler in samplers
    ]


def show(found: list[dict[str, Any]], num_pixels: int) -> None:
    """Print the table."""
    print(
        f"{'sampler':15}{'pixels timed':>13}{'seconds':>11}{'ratio':>8}{'GFLOP':>11}{'of matmul rate':>16}{'equal':>8}"
    )
    for row in found:
        print(
            f"{row['sampler']:15}{row['pixels_timed']:13d}{row['seconds']:11.3f}{row['ratio']:8.1f}{row['gflop']:11.2f}"
            f"{100 * row['matmul_fraction']:15.1f}%{100 * row['equal_images']:7.0f}%"
        )
    print(f"seconds and GFLOP: for all {num_pixels} pixels, scaled from the timed ones; GFLOP: necessary products")
    print("equal: fraction of images that agree with the cached ones on the timed pixels")


def main(argv: list[str]) -> None:
    del argv
    problem = make_problem()
    total = IMAGE_SHAPE[0] * IMAGE_SHAPE[1]
    pixels = PIXELS.value or total
    latents_flops, pass_flops = drawing_flops(problem.model, IMAGES.value)
    naive_gflop = (latents_flops + total * pass_flops) / 1e9
    samplers = [
        Sampler("cached", total, cached(problem), (latents_flops + pass_flops) / 1e9),
        Sampler("compiled loop", pixels, compiled_loop(problem, pixels), naive_gflop),
        Sampler("python loop", pixels, python_loop(problem, pixels), naive_gflop),
    ]
    images = {sampler.name: np.asarray(sampler.run()) for sampler in samplers}  # also compiles
    difference = check_cached(problem, images["cached"])
    agreement = {name: equal_images(problem, x, images["cached"], pixels, name) for name, x in images.items()}
    product = Sampler("product", 1, *square_product())
    for _ in range(REPEATS.value):
        for sampler in samplers:
            sampler.measure()
            product.measure()
    rate = product.gflop / statistics.median(product.times)
    print(f"{IMAGES.value} images, {problem.model.channels} channels; matrix product: {rate:.0f} GFLOP/s")
    found = figures(samplers, agreement, rate, total)
    show(found, total)
    print(f"means of cached drawing and of one pass over its images differ by at most {difference:.1e}")
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump({"matmul_gflops": rate, "largest_difference": difference, "samplers": found}, file, indent=2)


if __name__ == "__main__":
    app.run(main)

"""A training step of `convhvae` with a Gaussian prior, beside the same network in PyTorch.

python -m benchmarks.peer [--rounds=10] [--out=FILE.json]

Needs PyTorch, which is not in requirements.txt. Both take a batch of 100 binary images of 28x28, compute the ELBO and
its gradient, and update with Adam. PyTorch's network is written as its users write it: NCHW images, two convolutions
for value and gate, `torch.optim.Adam`. The two alternate in one process, each with all cores.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from typing import Any

import numpy as np
import torch
from absl import app, flags
from torch import nn

from benchmarks.flops import square_product
from benchmarks.loop import EXPERIMENTS, TRAINING_SETS, Loop
from exvae import config as configs
from exvae.data.store import Store
from exvae.models.convhvae import DECODER_LAYERS, Z1_STACK, Z2_STACK
from exvae.scale import sharding

ROUNDS = flags.DEFINE_integer("rounds", 10, "number of steps of each")
OUT = flags.DEFINE_string("out", "", "also write the result to this JSON file")
LATENT, LOWER, HIDDEN, CHANNELS, SIZE = 40, 40, 300, 64, 28


class Gated(nn.Module):
    """f(x) sigmoid(g(x)) for two equal layers f and g."""

    def __init__(self, value: nn.Module, gate: nn.Module):
        super().__init__()
        self.value, self.gate = value, gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(x) * torch.sigmoid(self.gate(x))


def gated_conv(channels: int, features: int, size: int, stride: int = 1) -> Gated:
    """A gated convolution."""
    return Gated(*(nn.Conv2d(channels, features, size, stride, size // 2) for _ in range(2)))


def gated_dense(inputs: int, features: int) -> Gated:
    """A gated dense layer."""
    return Gated(nn.Linear(inputs, features), nn.Linear(inputs, features))


def stack(layers: tuple[tuple[int, int, int], ...]) -> tuple[nn.Module, int]:
    """The convolutions that read an image, and the number of their outputs."""
    modules, channels, side = [], 1, SIZE
    for features, size, stride in layers:
        modules.append(gated_conv(channels, features, size, stride))
        channels, side = features, math.ceil(side / stride)
    return nn.Sequential(*modules, nn.Flatten()), channels * side**2


class Head(nn.Module):
    """Mean and log-variance."""

    def __init__(self, inputs: int, features: int):
        super().__init__()
        self.mean, self.log_var = nn.Linear(inputs, features), nn.Linear(inputs, features)

    def forward(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.mean(h), self.log_var(h).clamp(-6.0, 2.0)


def log_normal(z: torch.Tensor, mean: torch.Tensor | float, log_var: torch.Tensor) -> torch.Tensor:
    """log N(z | mean, exp(log_var)) without its constant, per row."""
    return -0.5 * (log_var + (z - mean) ** 2 / log_var.exp()).sum(1)


class ConvHVAE(nn.Module):
    """The architecture c of the supplement, as `exvae.models.convhvae`."""

    def __init__(self) -> None:
        super().__init__()
        self.z2_from_x, z2_features = stack(Z2_STACK)
        self.z1_from_x, z1_features = stack(Z1_STACK)
        self.q_z2, self.z1_from_z2 = Head(z2_features, LATENT), gated_dense(LATENT, z1_features)
        self.q_z1_joint, self.q_z1 = gated_dense(2 * z1_features, HIDDEN), Head(HIDDEN, LOWER)
        self.p_z1 = nn.Sequential(gated_dense(LATENT, HIDDEN), gated_dense(HIDDEN, HIDDEN), Head(HIDDEN, LOWER))
        self.p_x_z1, self.p_x_z2 = gated_dense(LOWER, HIDDEN), gated_dense(LATENT, HIDDEN)
        layers = [gated_conv(1 if i == 0 else CHANNELS, CHANNELS, 3) for i in range(DECODER_LAYERS)]
        self.image = gated_dense(2 * HIDDEN, SIZE * SIZE)
        self.p_x = nn.Sequential(*layers, nn.Conv2d(CHANNELS, 1, 1))

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        """The negative ELBO."""
        mean2, log_var2 = self.q_z2(self.z2_from_x(x))
        z2 = mean2 + torch.randn_like(mean2) * (0.5 * log_var2).exp()
        q1 = self.q_z1(self.q_z1_joint(torch.cat([self.z1_from_x(x), self.z1_from_z2(z2)], 1)))
        z1 = q1[0] + torch.randn_like(q1[0]) * (0.5 * q1[1]).exp()
        joint = torch.cat([self.p_x_z1(z1), self.p_x_z2(z2)], 1)
        logits = self.p_x(self.image(joint).reshape(-1, 1, SIZE, SIZE))
        log_px = -nn.functional.binary_cross_entropy_with_logits(logits, x, reduction="none").sum((1, 2, 3))
        kl = log_normal(z2, mean2, log_var2) - log_normal(z2, 0.0, torch.zeros_like(z2))
        kl = kl + log_normal(z1, *q1) - log_normal(z1, *self.p_z1(z2))
        return (kl - log_px).mean()


def peer_step() -> Any:
    """A function that takes one step in PyTorch."""
    torch.manual_seed(0)
    model, images = ConvHVAE(), torch.rand(1000, 1, SIZE, SIZE)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)

    def step() -> None:
        x = torch.bernoulli(images[torch.randint(len(images), (100,))])
        optimizer.zero_grad()
        model.loss(x).backward()
        optimizer.step()

    return step


def own_step() -> Any:
    """A function that takes one step here."""
    config = EXPERIMENTS["convhvae"].get_config("prior=gaussian")
    shape = TRAINING_SETS[config.data.name]
    images = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    loop = Loop(configs.resolve(config, len(images)), Store(sharding.make_mesh(), images, 1e6, 0), None)
    return loop.run


def main(argv: list[str]) -> None:
    del argv
    product, gflop = square_product()
    runs = {"exvae": own_step(), "pytorch": peer_step(), "product": product}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(ROUNDS.value + 2):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            if number >= 2:  # the first ones warm up
                times[name].append(time.perf_counter() - began)
    middle = {name: statistics.median(values) for name, values in times.items()}
    found = {
        "exvae_ms": round(1e3 * middle["exvae"], 1),
        "pytorch_ms": round(1e3 * middle["pytorch"], 1),
        "ratio": round(middle["exvae"] / middle["pytorch"], 3),
        "matmul_gflops": round(gflop / middle["product"]),
        "pytorch_version": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    print("  ".join(f"{name} {value}" for name, value in found.items()))
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    app.run(main)

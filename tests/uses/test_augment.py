"""The augmented classifier: its loss, its noise, its records, and the Python interface."""

import dataclasses
import functools
import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exvae import data, once
from exvae.errors import UserError
from exvae.runs import progress
from exvae.uses import augment, classifier
from tests.conftest import compilations

KEY = jax.random.key(0)


@pytest.fixture
def run(make_run):
    run = make_run()
    options = run.config.augment
    options.hidden_dim, options.epochs, options.networks, options.batch_size = 8, 2, 1, 40
    return run


@functools.partial(jax.jit, static_argnums=(0, 1))
def initialised(network, image_shape):
    return network.init(KEY, jnp.zeros((1, *image_shape)))["params"]


def world(run, learning_rate=0.1):
    """A classifier, its optimizer, its state and its source of images."""
    run.config.augment.learning_rate = learning_rate
    network = classifier.Classifier(8, 5)
    optimizer = classifier.make_optimizer(run.config, 10)
    params = initialised(network, run.model.image_shape)
    state = classifier.State(jnp.int32(0), params, optimizer.init(params))
    return network, optimizer, state, augment.make_source(run, run.grey.train)


def test_loss_is_the_weighted_smoothed_cross_entropy(run, rng):
    network, _, state, _ = world(run)
    real, new = rng.uniform(size=(2, 6, 28, 28, 1)).astype(np.float32)
    labels = rng.integers(0, 5, 6)

    def cross_entropy(x):
        h = x.reshape(6, -1).astype(np.float64)
        for name in ("Dense_0", "Dense_1", "Dense_2"):
            layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params[name])
            h = h @ layer["kernel"] + layer["bias"]
            h = np.maximum(h, 0) if name != "Dense_2" else h
        log_p = h - np.log(np.sum(np.exp(h), axis=1, keepdims=True))
        targets = np.full((6, 5), 0.1 / 5) + 0.9 * np.eye(5)[labels]  # supplement: 0.1 shared, 0.9 on the true class
        return -np.sum(targets * log_p, axis=1).mean()

    loss_fn = jax.jit(functools.partial(classifier.loss_fn, network, smoothing=0.1), static_argnames="lambda_")
    for lambda_ in (0.0, 0.3, 1.0):
        found = loss_fn(state.params, real, new, labels, lambda_=lambda_)
        want = lambda_ * cross_entropy(real) + (1 - lambda_) * cross_entropy(new)
        assert float(found) == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize("prior", ["exemplar", "gaussian", "vamp"])
def test_new_images_are_fresh_rounded_draws_around_their_sources(make_run, prior):
    run = make_run(prior)
    source = augment.make_source(run, run.grey.train)
    codes = jax.tree.map(lambda leaf: leaf[:5], source.codes)
    q = run.encode(run.grey.train.images[:5])
    np.testing.assert_allclose(codes.mean, q.mean, atol=1e-6)
    log_var = run.params["prior"]["log_var"] if prior == "exemplar" else q.log_var
    np.testing.assert_allclose(codes.log_var, np.broadcast_to(log_var, (5, 4)), atol=1e-6)
    synthesize = jax.jit(functools.partial(classifier.synthesize, model=run.model, params=run.params))
    one, other = (synthesize(jax.random.key(seed), codes=codes) for seed in (1, 2))
    assert (one != other).any(axis=(1, 2, 3)).all()
    np.testing.assert_allclose(one * 255, np.round(one * 255), atol=1e-4)
    still = synthesize(KEY, codes=codes._replace(log_var=jnp.full((5, 4), -jnp.inf)))
    np.testing.assert_allclose(still, run.reconstruct(run.grey.train.images[:5]), atol=0.51 / 255)


def test_noise_is_fresh_in_every_step_and_plain_training_has_none(run):
    """With a learning rate of zero, the loss of a batch changes only by the noise."""
    index = np.arange(40)
    for lambda_, changes in ((0.4, True), (0.0, True), (1.0, False)):
        network, optimizer, state, source = world(run, learning_rate=0.0)
        step = classifier.make_step(run.config, network, run.model, optimizer, lambda_=lambda_)
        losses = []
        for _ in range(3):
            state, loss = step(state, run.params, source, KEY, index)
            losses.append(float(loss))
        assert len(set(losses)) == (3 if changes else 1)
        assert int(state.step) == 3


def test_step_is_compiled_once(run):
    run.config.augment.networks, run.config.augment.lambdas = 2, (0.4,)
    once.forget()
    with compilations() as compiled:
        augment.main(run)  # two networks of two epochs
    assert compiled["step"] == 1


def test_no_gradient_reaches_the_model(run, monkeypatch):
    monkeypatch.setattr(jnp, "round", lambda x: x)  # because the gradient of `round` is zero anyway
    network, _, state, source = world(run)
    codes = jax.tree.map(lambda leaf: leaf[:20], source.codes)

    def loss(model_params, codes):
        new = classifier.synthesize(KEY, run.model, model_params, codes)
        return classifier.loss_fn(network, state.params, new, new, source.labels[:20], lambda_=0.0, smoothing=0.1)

    grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(run.params, codes)
    assert all((np.asarray(leaf) == 0).all() for leaf in jax.tree.leaves(grads))
    moved = jax.tree.map(lambda leaf: leaf + 0.05, run.params)
    loss = jax.jit(loss)
    assert float(loss(moved, codes)) != float(loss(run.params, codes))  # although the loss depends on the model


def test_rate_falls_linearly_to_a_hundredth(run):
    run.config.augment.learning_rate = 0.1
    optimizer = classifier.make_optimizer(run.config, 100)
    params, state, moves = jnp.zeros(()), optimizer.init(jnp.zeros(())), []
    for _ in range(100):
        update, state = optimizer.update(jnp.ones(()), state, params)
        moves.append(-float(update))
    momentum = np.cumsum(0.9 ** np.arange(100))  # for a constant gradient
    rates = np.array(moves) / momentum
    np.testing.assert_allclose(rates, 0.1 - 0.099 * np.arange(100) / 100, rtol=1e-4)


def in_own_folder(run, name):
    """The same run in its own folder."""
    other = dataclasses.replace(run, workdir=run.workdir / name)
    other.workdir.mkdir()
    return other


def captured(monkeypatch) -> list:
    """A list that collects (classifier, parameters, images) of every evaluation."""
    seen, predict = [], augment.predict

    def watch(classifier, params, images):
        seen.append((classifier, jax.device_get(params), images))
        return predict(classifier, params, images)

    monkeypatch.setattr(augment, "predict", watch)
    return seen


def test_killed_training_resumes_bit_for_bit_and_repeats_no_finished_network(run, monkeypatch, capsys):
    run.config.augment.lambdas, run.config.augment.epochs = (0.4,), 3
    monkeypatch.setattr(augment, "SAVE_SECONDS", 0)
    seen = captured(monkeypatch)
    straight = in_own_folder(run, "straight")
    augment.main(straight)

    class Kill(progress.Countdown):
        def show(self, done):
            if done > 360:  # in the second epoch
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(progress, "Countdown", Kill)
        with pytest.raises(KeyboardInterrupt):
            augment.main(run)
    assert len(seen) == 1
    steps, make_step = [], augment.make_step

    def counting(*args, **options):
        step = make_step(*args, **options)
        return lambda *inputs: steps.append(1) or step(*inputs)

    with monkeypatch.context() as patch:
        patch.setattr(augment, "make_step", counting)
        augment.main(run)
    assert len(steps) == 18  # the first of three epochs is not repeated
    jax.tree.map(np.testing.assert_array_equal, seen[0][1], seen[1][1])
    numbers = [json.loads((place / "augment_test.json").read_text()) for place in (straight.workdir, run.workdir)]
    assert numbers[0] == numbers[1]
    assert [path.suffix for path in (run.workdir / "augmentation").iterdir()] == [".jsonl"]  # no temporary file is left
    run.config.augment.networks = 2
    augment.main(run)
    assert len(seen) == 3  # one more network, not two
    errors = json.loads((run.workdir / "augment_test.json").read_text())["errors"]
    assert errors[0]["mean"] == pytest.approx(np.mean(errors[0]["errors"]))
    assert errors[0]["std"] == pytest.approx(np.std(errors[0]["errors"], ddof=1))
    assert "± " in capsys.readouterr().out


def test_task_trains_on_the_right_images_and_plots_a_sweep(run, monkeypatch, capsys):
    sizes, make_source = [], augment.make_source
    monkeypatch.setattr(augment, "make_source", lambda run, split: sizes.append(len(split)) or make_source(run, split))
    run.config.augment.epochs, run.config.augment.lambdas = 1, (1.0, 0.0)
    other = in_own_folder(run, "other")
    run.config.augment.split = "valid"
    augment.main(other)
    run.config.augment.compare = str(run.workdir / "o*")
    lines = []
    monkeypatch.setattr(augment.figures, "save_lines", lambda path, found, *_: lines.append(found))
    augment.main(run)
    assert sizes == [320, 320]
    assert set(lines[0]) == {f"{run.workdir.name} (exemplar)", "other (exemplar)"}
    x, y, _ = lines[0]["other (exemplar)"]
    assert x == [0.0, 1.0]
    results = json.loads((run.workdir / "augment_valid.json").read_text())["errors"]
    assert y == pytest.approx([100 * line["mean"] for line in results])
    assert (run.workdir / "figures" / "misclassified_valid.png").exists()
    run.config.augment.split, run.config.augment.lambdas = "test", (1.0,)
    augment.main(run)
    assert sizes[2] == 360  # train and valid
    assert "left out of the plot" in capsys.readouterr().out  # the other run has no such result


def test_records_and_captions_are_those_of_the_held_out_images(run, monkeypatch):
    run.config.augment.networks, run.config.augment.lambdas = 2, (1.0, 0.4)
    networks, smoothing, make_step = captured(monkeypatch), [], augment.make_step
    monkeypatch.setattr(
        augment,
        "make_step",
        lambda config, *args, lambda_: (
            smoothing.append((lambda_, config.augment.label_smoothing)) or make_step(config, *args, lambda_=lambda_)
        ),
    )
    shown = {}
    monkeypatch.setattr(
        augment.figures,
        "save_captioned",
        lambda path, images, captions, **_: shown.update(images=images, captions=captions),
    )
    augment.main(run)
    assert smoothing == [(1.0, 0.1), (0.4, 0.1)]
    test = run.grey.test
    (path,) = (run.workdir / "augmentation").glob("*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    assert [(record["lambda"], record["network"][-1]) for record in records] == [
        (1, "0"),
        (1, "1"),
        (0.4, "0"),
        (0.4, "1"),
    ]
    apply = jax.jit(networks[0][0].apply)
    for record, (_, params, images) in zip(records, networks, strict=True):
        np.testing.assert_array_equal(images, test.images)
        logits = apply({"params": params}, jnp.asarray(test.images / 255, jnp.float32))
        labels = np.argmax(logits, axis=1)  # labels are 0..4 here
        wrong = np.flatnonzero(labels != test.labels)
        assert record["error"] == len(wrong) / 40
        assert (record["wrong"], record["predicted"]) == (wrong.tolist(), labels[wrong].tolist())
    kernels = [params["Dense_0"]["kernel"] for _, params, _ in networks]
    assert all((a != b).any() for a, b in itertools.combinations(kernels, 2))  # seeds and lambdas differ
    means = {1.0: np.mean([r["error"] for r in records[:2]]), 0.4: np.mean([r["error"] for r in records[2:]])}
    best = records[0 if means[1.0] <= means[0.4] else 2]
    np.testing.assert_allclose(shown["images"], test.images[best["wrong"]] / 255, atol=1e-6)
    assert shown["captions"] == [
        f"{test.labels[i]} as {label}" for i, label in zip(best["wrong"], best["predicted"], strict=True)
    ]


def test_broken_results_of_other_runs_are_left_out(run, capsys):
    run.config.augment.epochs, run.config.augment.compare = 1, str(run.workdir / "o*")
    run.config.augment.lambdas = (1.0,)
    augment.main(run)
    assert "matches no folder" in capsys.readouterr().out
    for name, text in (("one", "{"), ("other", "{}"), ("old", '{"settings": 1, "prior": "x", "errors": [{}]}')):
        (run.workdir / f"o{name}").mkdir()
        (run.workdir / f"o{name}" / "augment_test.json").write_text(text)
    augment.main(run)
    assert capsys.readouterr().out.count("left out of the plot") == 3


def test_training_learns(run):
    """The error on linearly separable classes falls to zero."""
    images = np.zeros((200, 28, 28, 1), np.uint8)
    labels = np.where(np.arange(200) % 2, 1000, -1).astype(np.int32)  # labels may be any integers
    images[labels > 0, :14] = 255
    run = dataclasses.replace(run, grey=data.Dataset(*3 * [data.Split(images, labels)]))
    run.config.augment.lambdas = (1.0,)
    augment.main(run)
    assert json.loads((run.workdir / "augment_test.json").read_text())["errors"][0]["errors"] == [0.0]


def test_unlabelled_data_and_large_batches_are_refused(run):
    run.config.augment.batch_size = 361
    with pytest.raises(UserError, match="augment.batch_size=361 must be at most 360"):
        augment.main(run)
    run = dataclasses.replace(run, grey=data.Dataset(*(data.Split(part.images) for part in vars(run.grey).values())))
    with pytest.raises(UserError, match="these images have no labels"):
        augment.main(run)


def test_diverging_training_names_the_network_and_the_epoch(run, monkeypatch):
    run.config.augment.learning_rate, run.config.augment.lambdas = 1e30, (1.0,)
    monkeypatch.setattr(augment, "SAVE_SECONDS", 0)
    for _ in range(2):  # the second run does not resume from a state that is not finite
        with pytest.raises(FloatingPointError, match="lambda 1, network 1 of 1: the loss is not finite in epoch 1"):
            augment.main(run)


def test_augment_gives_n_new_versions_of_each_image(run):
    images = run.dataset.test.images[:3]
    new = run.augment(KEY, images, 4)
    assert new.shape == (3, 4, 28, 28, 1)
    assert len(np.unique(new.reshape(12, -1), axis=0)) == 12
    still = run.augment(KEY, images, 2, temperature=0.0)
    np.testing.assert_allclose(still, np.repeat(run.reconstruct(images)[:, None], 2, axis=1), atol=1e-5)


def test_batches_keep_labels_and_mix_real_and_new_images(run):
    images, names = run.grey.train.images[:50], np.array([f"image {i}" for i in range(50)])
    lookup = {name: image / np.float32(255) for name, image in zip(names, images, strict=True)}
    batches = list(itertools.islice(run.augmented_batches(KEY, images, names, 20, real=0.5), 6))
    same = [np.abs(x[i] - lookup[y[i]]).max() < 1e-6 for x, y in batches for i in range(20)]
    assert 0.3 < np.mean(same) < 0.7
    assert all(x.shape == (20, 28, 28, 1) and x.dtype == np.float32 and len(set(y)) == 20 for x, y in batches)
    x, y = next(run.augmented_batches(KEY, images, names, 20, real=1.0))
    np.testing.assert_allclose(x, np.stack([lookup[name] for name in y]), atol=1e-6)
    first = next(run.augmented_batches(KEY, images, names, 20, real=0.5))
    np.testing.assert_array_equal(first[0], batches[0][0])  # the same key gives the same batches
    epochs = [set(y) for _, y in batches]
    assert epochs[0].isdisjoint(epochs[1])  # two batches of one epoch
    for labels, real, size in ((names[:9], 0.5, 20), (names, 1.5, 20), (names, 0.5, 51)):
        with pytest.raises(UserError):
            run.augmented_batches(KEY, images, labels, size, real)

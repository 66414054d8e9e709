"""kNN, explanations and memorisation, compared with scikit-learn and brute force."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats
from sklearn.neighbors import KNeighborsClassifier

from exvae import data
from exvae.errors import UserError
from exvae.evaluation import pixels
from exvae.uses import represent


@pytest.fixture
def points(rng):
    """Three clouds that overlap, so that votes are often tied."""
    labels = rng.integers(0, 3, 700).astype(np.int32)
    return (rng.normal(size=(700, 4)) + labels[:, None]).astype(np.float32), labels


def test_knn_errors_equal_those_of_scikit_learn(points, monkeypatch):
    monkeypatch.setattr(represent, "BATCH", 60)  # several batches, the last one padded
    x, y = points
    found = represent.knn_errors(x[:550], y[:550], x[550:], y[550:])
    assert tuple(found) == (3, 5, 7, 9, 11, 13, 15)
    for k, error in found.items():
        reference = KNeighborsClassifier(k).fit(x[:550], y[:550])
        assert error == pytest.approx(1 - reference.score(x[550:], y[550:]), abs=1e-9)


def test_vote_is_the_most_frequent_label_and_the_smallest_of_ties(rng):
    labels = rng.integers(0, 4, (200, 9)).astype(np.int32)
    found = represent.vote(jnp.asarray(labels), (1, 4, 9))
    for row, k in zip(np.asarray(found), (1, 4, 9), strict=True):
        np.testing.assert_array_equal(row, stats.mode(labels[:, :k], axis=1).mode)  # SciPy also takes the smallest one


def test_k_is_chosen_on_validation_and_tested_with_train_and_valid(points):
    x, y = points
    parts = {"train": slice(0, 300), "valid": slice(300, 450), "test": slice(450, 700)}
    empty = np.zeros((0, 1, 1, 1), np.uint8)
    dataset = data.Dataset(*(data.Split(empty, y[part]) for part in parts.values()))
    found = represent.classify({name: x[part] for name, part in parts.items()}, dataset)
    score = {k: KNeighborsClassifier(k).fit(x[:300], y[:300]).score(x[300:450], y[300:450]) for k in represent.KS}
    assert found["k"] == max(score, key=score.get)
    reference = KNeighborsClassifier(found["k"]).fit(x[:450], y[:450]).score(x[450:], y[450:])
    assert found["error"] == pytest.approx(1 - reference, abs=1e-9)


def test_knn_without_labels_or_with_too_few_images_is_refused(points):
    x, y = points
    with pytest.raises(UserError, match="needs labels"):
        represent.classify({}, data.Dataset(*(data.Split(x) for _ in range(3))))
    with pytest.raises(UserError, match="at least 3 known images, not 2"):
        represent.knn_errors(x[:2], y[:2], x, y)


def test_responsibilities_match_brute_force_and_sum_to_one(make_run, monkeypatch):
    monkeypatch.setattr(represent, "GATHERED", 4 * 320 * 7)  # seven images at a time
    run = make_run()
    images = run.dataset.test.images[:10]
    found = run.nearest_exemplars(images, len(run.exemplars))
    np.testing.assert_allclose(found.responsibility.sum(1), 1.0, rtol=1e-4)
    z, means = (a.astype(np.float64) for a in (run.encode(images).mean, run.means))
    var = np.exp(np.float64(run.params["prior"]["log_var"]))
    log_r = -0.5 * np.sum((z[:, None] - means) ** 2, -1) / var
    want = special.softmax(log_r, axis=1)
    np.testing.assert_allclose(found.responsibility, np.take_along_axis(want, found.index, 1), rtol=2e-3, atol=1e-7)
    assert (np.sort(found.index, 1) == np.arange(320)).all()
    assert (np.diff(found.responsibility, axis=1) <= 1e-6).all()
    few = run.nearest_exemplars(images, 3)
    np.testing.assert_allclose(few.responsibility, found.responsibility[:, :3], rtol=1e-4)


def test_explanations_need_exemplars_and_a_valid_k(make_run):
    with pytest.raises(UserError, match="the vamp prior has no exemplars"):
        make_run("vamp").nearest_exemplars(make_run().dataset.test.images)
    for k in (0, 321):
        with pytest.raises(UserError, match=r"must lie in 1..320"):
            make_run().nearest_exemplars(make_run().dataset.test.images, k)


def test_distance_to_the_nearest_image_matches_brute_force(rng, monkeypatch):
    monkeypatch.setattr(pixels, "BATCH", 7)
    exemplars = rng.integers(0, 256, (2100, 3, 3, 1), dtype=np.uint8)  # more than one block
    x = rng.uniform(size=(20, 3, 3, 1)).astype(np.float32)
    x[0] = exemplars[2099] / np.float32(255)
    want = np.sqrt(np.sum((x[:, None] - exemplars / 255.0) ** 2, axis=(2, 3, 4))).min(1)
    np.testing.assert_allclose(pixels.nearest_distance(x, exemplars), want, atol=2e-3)


def test_memorisation_detects_a_model_that_copies(make_run, monkeypatch):
    """If samples are training images, their distance to the training set is zero."""
    run = make_run()
    copies = lambda key, run, count, **_: type("S", (), {"images": run.exemplars.images[:count] / np.float32(255)})  # noqa: E731
    monkeypatch.setattr(represent.generate, "sample", copies)
    found = represent.memorisation(jax.random.key(0), run, 15)
    assert found["samples"].max() < 1e-2 < found["held-out images"].min()
    assert all(len(values) == 15 for values in found.values())


def test_memorisation_compares_with_the_right_images(make_run, monkeypatch):
    """If reconstruction is perfect, training images have distance zero and held-out images do not."""
    monkeypatch.setattr(represent.generate, "reconstruct", lambda run, images: images / np.float32(255))
    found = represent.memorisation(jax.random.key(0), make_run(), 15)
    assert found["training images, reconstructed"].max() < 1e-2
    assert found["held-out images, reconstructed"].min() > 1e-2
    np.testing.assert_allclose(found["held-out images"], found["held-out images, reconstructed"], atol=1e-6)


def test_explanations_show_each_images_own_exemplars(make_run, monkeypatch, tmp_path):
    run = make_run()
    seen = {}
    monkeypatch.setattr(
        represent.figures,
        "save_captioned",
        lambda path, images, captions, **how: seen.update(i=images, c=captions, **how),
    )
    lines = represent.save_explanations(run, np.array([7, 2]), tmp_path / "e.png")
    rows, captions = seen["i"].reshape(2, 12, 28, 28, 1), np.reshape(seen["c"], (2, 12))
    images = run.grey.test.images[[7, 2]]
    found = run.nearest_exemplars(images)
    np.testing.assert_allclose(rows[:, 0], images / 255, atol=1e-6)
    np.testing.assert_allclose(rows[:, 1], run.reconstruct(images), atol=1e-6)
    np.testing.assert_allclose(rows[:, 2:], run.exemplars.images[found.index] / 255, atol=1e-6)
    assert list(captions[:, 0]) == ["test 7", "test 2"]
    np.testing.assert_allclose(captions[:, 2:].astype(float), found.responsibility, atol=6e-4)
    np.testing.assert_array_equal(seen["marked"].reshape(2, 12), np.tile(np.arange(12) == 0, (2, 1)))
    np.testing.assert_allclose([line["responsibilities"] for line in lines], found.responsibility, atol=1e-5)


def test_one_dimensional_codes_have_a_plot(rng, tmp_path):
    represent.save_tsne(rng.normal(size=(20, 1)).astype(np.float32), None, tmp_path / "tsne.png")
    assert (tmp_path / "tsne.png").exists()


@pytest.mark.parametrize("prior", ["exemplar", "gaussian"])
def test_task_writes_numbers_means_and_figures(make_run, capsys, prior):
    run = make_run(prior)
    run.config.represent.memorisation_images = 20
    run.config.represent.explain = (3, 1)
    run.config.represent.tsne_images = 20 if prior == "exemplar" else 0
    represent.main(run)
    results = json.loads((run.workdir / "represent.json").read_text())
    assert set(results["knn"]["test"]) == {str(k) for k in represent.KS}
    assert f"{100 * results['knn']['error']:.2f} % with k={results['knn']['k']}" in capsys.readouterr().out
    with np.load(run.workdir / "latents.npz") as saved:
        np.testing.assert_allclose(saved["test"], run.encode(run.grey.test.images).mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(saved["valid_labels"], run.grey.valid.labels)
        binary = run.encode(run.dataset.test.images).mean
        assert results["active_units"] == np.sum(np.var(binary, axis=0) > 0.01)
        assert len(saved["train"]) == 320
    names = {path.stem for path in (run.workdir / "figures").glob("*.png")}
    assert names == {"memorisation"} | ({"explanations", "tsne"} if prior == "exemplar" else set())
    if prior == "exemplar":
        assert [line["image"] for line in results["explanations"]] == [3, 1]
        found = run.nearest_exemplars(run.grey.test.images[[3, 1]])
        np.testing.assert_array_equal([line["exemplars"] for line in results["explanations"]], found.index)


def test_task_without_labels_does_the_rest(make_run, capsys):
    run = make_run()
    bare = data.Dataset(*(data.Split(part.images) for part in vars(run.grey).values()))
    run = dataclasses.replace(run, grey=bare)
    run.config.represent.memorisation_images, run.config.represent.tsne_images = 20, 20
    represent.main(run, str(run.workdir / "mine.npz"))
    assert "needs labels, and these images have none: left out" in capsys.readouterr().out
    assert "knn" not in json.loads((run.workdir / "represent.json").read_text())
    with np.load(run.workdir / "mine.npz") as saved:
        assert set(saved) == {"train", "valid", "test"}


def test_image_to_explain_that_does_not_exist_is_refused(make_run):
    run = make_run()
    run.config.represent.explain = (40,)
    with pytest.raises(UserError, match="there is no test image 40, only 0..39"):
        represent.main(run)

"""Scores of images and models: independence of batches, caching, published statistics, bad input."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor

import tcm
from tcm.data import ArrayDataset, open_dataset
from tcm.evaluation import references
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import evaluate, evaluate_model
from tcm.evaluation.features import Detector, load_detector
from tcm.evaluation.generation import Sampling, generate, parse_seeds, parse_times, quantise, sampling_batch
from tcm.evaluation.measurement import Subject
from tcm.evaluation.references import Reference, chosen_images, observe, published_reference, reference_of
from tcm.evaluation.scores import differing_conditions
from tcm.evaluation.sharing import ALONE
from tcm.foundation.counting import counter
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.method.gaussians import Statistics

ME = Subject("me", "0" * 64)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def detector() -> Detector:
    return load_detector("digits")


@pytest.fixture(scope="module")
def digits() -> Tensor:
    return torch.from_numpy(open_dataset("digits").read(np.arange(1797))[0])


@pytest.fixture
def reference(detector: Detector) -> Reference:
    return reference_of(open_dataset("digits"), "digits", detector, keep=True)


def test_the_data_themselves_score_perfectly(digits: Tensor, reference: Reference) -> None:
    found = {s.metric: s for s in evaluate([digits], reference, ME, ("fid", "kid", "is", "precision-recall"))}
    assert found["digits distance"].value == pytest.approx(0, abs=1e-4)
    assert found["precision"].value == found["recall"].value == 1
    assert found["class score in digits"].value > 5
    assert all(score.count == score.reference_count == 1797 for score in found.values())
    assert not any(name.startswith("FID") for name in found)


@pytest.mark.parametrize("batch", [1, 7, 500])
def test_any_batch_size_gives_the_same_statistics(batch: int, digits: Tensor, detector: Detector) -> None:
    some = digits[:600]
    one, other = observe([some], detector).statistics, observe(torch.split(some, batch), detector).statistics
    torch.testing.assert_close(one.mean, other.mean, rtol=0, atol=1e-6)
    torch.testing.assert_close(one.covariance, other.covariance, rtol=0, atol=1e-6)


def test_damage_raises_the_distance_in_order(digits: Tensor, reference: Reference) -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(digits.shape, generator=generator)
    values = [
        evaluate([(digits + s * noise).clamp(0, 255).to(torch.uint8)], reference, ME)[0].value for s in (0, 15, 40, 90)
    ]
    assert values == sorted(values)
    assert values[-1] > 100 * max(values[0], 1e-3)


def test_the_reference_is_kept_by_content(detector: Detector, digits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    first = reference_of(ArrayDataset(digits[:100].numpy()), "a name", detector, keep=True)
    blind = dataclasses.replace(detector, network=torch.nn.Identity())
    again = reference_of(ArrayDataset(digits[:100].numpy()), "another name", blind, keep=True)
    assert torch.equal(first.statistics.covariance, again.statistics.covariance)
    assert torch.equal(first.features, again.features)
    changed = digits[:100].clone()
    changed[0, 0, 0, 0] ^= 1
    with pytest.raises(TcmError, match="must return"):
        reference_of(ArrayDataset(changed.numpy()), "a name", blind)
    with pytest.raises(TcmError, match="must return"):
        reference_of(ArrayDataset(digits[:100].numpy()), "a name", dataclasses.replace(blind, preprocessing="other"))


def flat_detector() -> Detector:
    """The four pixels of a 1×2×2 image are its features: nothing to compute, so that images may be many."""
    return Detector(
        name="pixels",
        hash="0" * 64,
        dimension=4,
        preprocessing="none",
        distance_name="distance of pixels",
        network=torch.nn.Flatten(),
        device=torch.device("cpu"),
        image_shape=(1, 2, 2),
    )


class CountedReads(ArrayDataset):
    """Counts the images that are read."""

    reads = 0

    def pixels(self, indices: np.ndarray) -> np.ndarray:
        self.reads += len(indices)
        return super().pixels(indices)


def many_images(count: int) -> CountedReads:
    return CountedReads(np.random.default_rng(0).integers(0, 256, (count, 1, 2, 2), dtype=np.uint8))


def test_single_images_of_a_large_reference_are_50_000_at_most() -> None:
    dataset = many_images(60_000)
    whole = reference_of(dataset, "many", flat_detector(), keep=True, batch=10_000)
    assert whole.statistics.count == 60_000
    assert whole.features is not None
    assert len(whole.features) == 50_000
    assert len(whole.features.unique(dim=0)) > 49_000
    assert float((whole.features.mean(0) - whole.statistics.mean).abs().max()) < 1  # of 255: chosen evenly
    seen = dataset.reads
    again = reference_of(dataset, "many", flat_detector(), keep=True)
    assert dataset.reads == seen + 60_000  # for the hash of its content
    assert torch.equal(whole.features, again.features)
    scores = {
        score.metric: score for score in evaluate([torch.randint(0, 256, (200, 1, 2, 2)).byte()], whole, ME, ("kid",))
    }
    assert scores["kernel distance in pixels"].settings.endswith(", 50,000 of the reference's images")


def test_statistics_that_are_there_are_not_computed_again_for_features() -> None:
    dataset, detector = many_images(300), flat_detector()
    alone = reference_of(dataset, "few", detector)
    assert alone.features is None
    both = reference_of(dataset, "few", detector, keep=True)
    assert both.features is not None
    assert torch.equal(both.features, torch.from_numpy(dataset.pixels(np.arange(300))).flatten(1).float())
    assert torch.equal(both.statistics.mean, alone.statistics.mean)


class Interrupted(ArrayDataset):
    """A data set that a user interrupts: Ctrl-C comes when the image after the first `patience` is read."""

    def __init__(self, images: np.ndarray, patience: int) -> None:
        super().__init__(images)
        self.patience, self.seen = patience, []

    def pixels(self, indices: np.ndarray) -> np.ndarray:
        if len(self.seen) + len(indices) > self.patience:
            raise KeyboardInterrupt
        self.seen += indices.tolist()
        return super().pixels(indices)


def test_interrupted_statistics_resume(digits: Tensor, detector: Detector, tmp_path: Path) -> None:
    whole = reference_of(ArrayDataset(digits.numpy()), "digits", detector)
    folder = tmp_path / "cache" / "references"
    for file in folder.iterdir():
        file.unlink()
    first = Interrupted(digits.numpy(), 1100)
    first.content_hash = lambda: whole.hash  # hashing reads all images, too
    with pytest.raises(KeyboardInterrupt):
        reference_of(first, "digits", detector)
    (kept,) = folder.iterdir()
    assert kept.name.endswith("-partial.safetensors")
    second = Interrupted(digits.numpy(), 10**6)
    second.content_hash = lambda: whole.hash
    again = reference_of(second, "digits", detector)
    assert second.seen == list(range(1024, len(digits))), "what the first call measured is not measured again"
    torch.testing.assert_close(again.statistics.mean, whole.statistics.mean)
    torch.testing.assert_close(again.statistics.covariance, whole.statistics.covariance)
    assert again.statistics.count == len(digits)
    assert not kept.exists()


def test_two_that_look_at_the_same_data_at_once(
    digits: Tensor, detector: Detector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them looks, the other waits and takes what it finds."""
    monkeypatch.setattr(references, "CHUNK", 300)
    datasets = [Interrupted(digits.numpy(), 10**6) for _ in range(2)]
    for dataset in datasets:
        dataset.content_hash = lambda: "of the digits"
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda dataset: reference_of(dataset, "digits", detector, keep=True), datasets))
    assert found[0].features is not None
    assert torch.equal(found[0].features, found[1].features)
    assert sorted(len(dataset.seen) for dataset in datasets) == [0, len(digits)]
    assert not list((tmp_path / "cache" / "references").glob("*partial*"))


def test_interrupted_features_resume(
    digits: Tensor, detector: Detector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "CHUNK", 300)
    whole = reference_of(ArrayDataset(digits.numpy()), "digits", detector, keep=True)
    folder = tmp_path / "cache" / "references"
    for file in folder.iterdir():
        file.unlink()
    first = Interrupted(digits.numpy(), 1100)
    first.content_hash = lambda: whole.hash
    with pytest.raises(KeyboardInterrupt):
        reference_of(first, "digits", detector, keep=True)
    second = Interrupted(digits.numpy(), 10**6)
    second.content_hash = lambda: whole.hash
    again = reference_of(second, "digits", detector, keep=True)
    assert second.seen == list(range(900, len(digits))), "three chunks were kept"
    torch.testing.assert_close(again.features, whole.features)
    torch.testing.assert_close(again.features, detector.features(digits))
    torch.testing.assert_close(again.statistics.covariance, Statistics.of(again.features).covariance)
    assert sorted(file.suffix for file in folder.iterdir()) == [".safetensors"] * 2


def test_a_part_of_the_reference(digits: Tensor, detector: Detector) -> None:
    dataset = ArrayDataset(digits.numpy())
    whole = reference_of(dataset, "digits", detector)
    part = reference_of(dataset, "digits", detector, keep=True, count=300)
    chosen = chosen_images(len(digits), 300)
    expected = Statistics.of(detector.features(digits[chosen]))
    torch.testing.assert_close(part.statistics.covariance, expected.covariance)
    assert (part.statistics.count, len(part.features), part.hash) == (300, 300, whole.hash)
    subject = Subject("mine", "0" * 64)
    scores = [evaluate([digits[:100]], reference, subject)[0] for reference in (whole, part)]
    assert differing_conditions(*scores) == ["reference_count: 1797 and 300"]
    assert reference_of(dataset, "digits", detector, count=10**6).statistics.count == len(digits)
    with pytest.raises(TcmError, match="reference_count=1 is too low"):
        reference_of(dataset, "digits", detector, count=1)


def test_passes_are_counted_in_a_log(digits: Tensor, detector: Detector) -> None:
    log = Console(file=StringIO(), width=200)
    reference_of(ArrayDataset(digits.numpy()), "digits", detector, batch=600, counter=counter(ALONE, log, every=0.0))
    lines = log.file.getvalue().splitlines()
    assert [line.partition(" images,")[0] for line in lines] == [
        f"reference digits: {done:,} of 1,797" for done in (600, 1200, 1797)
    ]
    assert lines[-1].endswith("images/s, 0 s left")
    quiet = Console(file=StringIO())
    assert len(list(counter(ALONE, quiet)([digits], None, "stream"))) == 1
    assert quiet.file.getvalue() == "", "ten seconds have not passed"
    list(counter(ALONE, quiet, 0.0)([digits[:5]], None, "stream"))
    assert quiet.file.getvalue().startswith("stream: 5 images, ")


def test_passes_are_counted_on_a_terminal(digits: Tensor) -> None:
    terminal = Console(file=StringIO(), width=100, force_terminal=True)
    batches = [digits[:1000], digits[1000:]]
    assert list(counter(ALONE, terminal)(batches, 1797, "reference digits")) == batches
    assert "1797/1797" in terminal.file.getvalue()


def test_dfid_measures_50_000_images_unless_given_a_count() -> None:
    dataset = many_images(60_000)
    reference = reference_of(dataset, "many", flat_detector(), batch=10_000)
    dataset.reads = 0
    (score,) = denoising_distances(lambda x, t, labels: x, dataset, [0.01], reference, ME, batch=10_000)
    assert score.count == dataset.reads == 50_000
    (score,) = denoising_distances(lambda x, t, labels: x, dataset, [0.01], reference, ME, count=123)
    assert score.count == 123
    few = many_images(70)
    (score,) = denoising_distances(lambda x, t, labels: x, few, [0.01], reference, ME)
    assert score.count == 70


def test_published_statistics(tmp_path: Path, digits: Tensor, detector: Detector) -> None:
    statistics = observe([digits], detector).statistics
    np.savez(tmp_path / "edm.npz", mu=statistics.mean.numpy(), sigma=statistics.covariance.numpy())
    published = published_reference(tmp_path / "edm.npz", detector)
    (score,) = evaluate([digits], published, ME)
    assert score.value == pytest.approx(0, abs=1e-9)
    assert score.reference_count is None
    with pytest.raises(TcmError, match="need features"):
        evaluate([digits], published, ME, ("kid",))
    np.savez(tmp_path / "small.npz", mu=np.zeros(3), sigma=np.eye(3))
    with pytest.raises(TcmError, match="64 features"):
        published_reference(tmp_path / "small.npz", detector)
    np.savez(tmp_path / "nan.npz", mu=np.full(64, np.nan), sigma=np.eye(64))
    with pytest.raises(TcmError, match="NaN"):
        published_reference(tmp_path / "nan.npz", detector)
    (tmp_path / "text.npz").write_text("no")
    with pytest.raises(TcmError, match="mu and sigma"):
        published_reference(tmp_path / "text.npz", detector)


def test_few_images_warn_of_the_rank(digits: Tensor, reference: Reference) -> None:
    with pytest.warns(TcmWarning, match="rank 19 in 64"):
        (score,) = evaluate([digits[:20]], reference, ME)
    assert "rank 19" in str(score.note)


def test_bad_images_are_refused(reference: Reference) -> None:
    with pytest.raises(TcmError, match="no images"):
        evaluate([], reference, ME)
    with pytest.raises(TcmError, match=r"mixed.*prepare"):
        evaluate([torch.zeros(1, 1, 8, 8).byte(), torch.zeros(1, 1, 9, 9).byte()], reference, ME)
    with pytest.raises(TcmError, match="uint8"):
        evaluate([torch.full((2, 1, 8, 8), float("nan"))], reference, ME)
    with pytest.raises(TcmError, match="1 of 2 images hold NaN"):
        quantise(torch.tensor([0.0, float("nan")]).view(2, 1, 1, 1))


def make_model(kind: str = "consistency", **changes: object) -> tcm.Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = tcm.DDPMppConfig(channels=16, channel_mult=(1,), blocks=1)
        card = {
            "kind": kind,
            "network": network,
            "image_shape": (1, 8, 8),
            "condition": {"kind": "classes", "count": 10},
            "t_max": 10.0,
            **changes,
        }
        model = tcm.Model.fresh(tcm.ModelCard.model_validate(card))
        for parameter in model.denoiser.parameters():  # a fresh network's last layer is zero, and F with it
            parameter.data += 0.1 * torch.randn_like(parameter)
        return model


@pytest.mark.parametrize(("kind", "sampling"), [("consistency", Sampling(2)), ("diffusion", Sampling(3))])
def test_samples_depend_on_the_seed_alone(kind: str, sampling: Sampling) -> None:
    model = make_model(kind)
    whole = torch.cat(list(generate(model, range(20), sampling, batch=20)))
    parts = torch.cat(list(generate(model, range(20), sampling, batch=3)))
    alone = torch.cat(list(generate(model, [13], sampling)))
    assert torch.equal(whole, parts)
    assert torch.equal(whole[13:14], alone)
    assert len({image.numpy().tobytes() for image in whole}) == 20


def test_a_batch_fits_into_the_memory_limit() -> None:
    """Twice the memory, twice the images; never none, never without end."""
    model = make_model()
    few, more = (sampling_batch(model, megabytes * 1_000_000) for megabytes in (5, 10))
    assert 2 * few <= more <= 2 * few + 1
    assert sampling_batch(model, 0) == 1
    assert sampling_batch(model, 10**15) == 256
    assert 1 <= sampling_batch(model) <= 256


def test_a_models_score_names_its_sampling(reference: Reference) -> None:
    model = make_model()
    (one,) = evaluate_model(model, "m", range(5, 105), Sampling(2), reference)
    assert (one.sampling, one.seed, one.count) == ("times 10, 1, fp32", 5, 100)
    (heun,) = evaluate_model(make_model("diffusion"), "m", range(100), Sampling(4), reference)
    assert heun.sampling == "Heun, 4 steps, 7 evaluations, fp32"
    assert one.subject_hash == heun.subject_hash  # the same weights
    (bf16,) = evaluate_model(model, "m", range(5, 105), Sampling(2, precision="bf16"), reference)
    assert bf16.value == pytest.approx(one.value, rel=0.1)
    assert bf16.value != one.value


def exact_denoiser(data: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """D(x, t) = Σ w_i x_i, w = softmax(-|x - x_i|²/2t²): the ideal denoiser of a finite data set."""

    def denoise(x: Tensor, t: Tensor, labels: Tensor | None) -> Tensor:
        distance = torch.cdist(x.flatten(1).double(), data.flatten(1).double()) ** 2
        weights = (-distance / (2 * t.double().view(-1, 1) ** 2)).softmax(1)
        return (weights @ data.flatten(1).double()).view_as(x).float()

    return denoise


def test_dfid_of_the_exact_denoiser_grows_from_zero(digits: Tensor, reference: Reference) -> None:
    f = exact_denoiser(digits.float() / 127.5 - 1)
    times = [0.01, 0.3, 0.6, 1.0, 2.0, 5.0]
    scores = denoising_distances(f, open_dataset("digits"), times, reference, ME, batch=200)
    values = [score.value for score in scores]
    assert values[0] == pytest.approx(0, abs=1e-6)
    assert values == sorted(values)
    assert values[-1] > 50
    assert [score.t for score in scores] == times
    assert (scores[0].metric, scores[0].label) == ("denoised digits distance", "denoised digits distance at t=0.01")
    again = denoising_distances(f, open_dataset("digits"), [1.0], reference, ME, batch=77)
    assert again[0].value == pytest.approx(values[3], rel=1e-6)


def test_dfid_of_a_model_below_its_range_and_without_labels(digits: Tensor, reference: Reference) -> None:
    model = make_model("truncated", t_min=1.0)
    (score,) = denoising_distances(model_denoise(model), open_dataset("digits"), [0.2], reference, ME, count=200)
    assert score.count == 200
    with pytest.raises(
        TcmError, match="the model takes 10 classes, but the data has none; give data annotated with 10 classes"
    ):
        denoising_distances(model_denoise(model), ArrayDataset(digits.numpy()), [0.2], reference, ME)
    with pytest.raises(TcmError, match="positive"):
        denoising_distances(model_denoise(model), open_dataset("digits"), [0.0], reference, ME)


def test_seeds_and_times_as_text() -> None:
    assert parse_seeds("0-3, 10,7-7") == [0, 1, 2, 3, 10, 7]
    assert parse_times("80,1.526") == (80.0, 1.526)
    for wrong in ("", "a", "3-1", "1-", "-1", "0,0", "1.5", "0-99999999999"):
        with pytest.raises(TcmError, match="seeds="):
            parse_seeds(wrong)
    for wrong in ("", "80,", "nan", "inf", "-1", "80 1"):
        with pytest.raises(TcmError, match="times="):
            parse_times(wrong)


def test_an_inception_score_without_classes_is_refused_before_anything_is_drawn(reference: Reference) -> None:
    headless = dataclasses.replace(reference, detector=dataclasses.replace(reference.detector, head=None))

    def never() -> Iterator[Tensor]:
        raise AssertionError("an image was drawn")
        yield

    with pytest.raises(TcmError, match="no class head"):
        evaluate(never(), headless, ME, ("fid", "is"))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789-,. eE+naif", max_size=12))
def test_any_text_is_seeds_and_times_or_our_error(text: str) -> None:
    try:
        seeds = parse_seeds(text)
    except TcmError:
        seeds = [0]
    assert len(set(seeds)) == len(seeds) > 0
    assert all(0 <= seed < 2**63 for seed in seeds)
    try:
        times = parse_times(text)
    except TcmError:
        times = (1.0,)
    assert all(0 < t < float("inf") for t in times)

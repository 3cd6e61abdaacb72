"""A kind of condition from outside goes the whole way, from the data to the report, as it is."""

import json
import pickle
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from inprocess import ALONE, train
from launching import tiny_recipe
from typer.testing import CliRunner
from vector_condition import HalvesData, VectorConfig, VectorKind, Vectors

from tcm.cli.main import app
from tcm.data import ArrayDataset, Batches, Stream, StreamBatches, open_data, open_dataset, to_uint8
from tcm.data.images import in_memory
from tcm.data.opening import with_channels
from tcm.data.prepare import Crop, Form, Preparation
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import evaluate_model, model_subject
from tcm.evaluation.features import load_detector
from tcm.evaluation.generation import Sampling, conditions_of, generate
from tcm.evaluation.references import reference_of
from tcm.evaluation.scores import append_scores, read_scores
from tcm.evaluation.whole_run import MeasurementPlan, measure_stage, unmeasured_stages
from tcm.foundation.errors import TcmError
from tcm.foundation.files import write_text
from tcm.foundation.signals import StopRequest
from tcm.method.conditions import Condition
from tcm.networks.cost import network_cost
from tcm.recipes.estimates import estimate
from tcm.recipes.lineage import roles_of
from tcm.recipes.resolve import resolve, to_toml
from tcm.recipes.schema import Recipe
from tcm.report.drawing import observe_run
from tcm.report.headline import headline_rows
from tcm.report.records import read_run
from tcm.training.adapting import adapted, check_data
from tcm.training.metrics import time_bins
from tcm.training.stage_models import card_of
from tcm.training.trainer import Trainer
from tcm.weights import Model, ModelCard, inspect

KIND = VectorKind(2)


def make_recipe() -> Recipe:
    condition = "condition={kind='vector_condition:VectorKind', width=2}"
    words = [
        "classes=none",
        condition,
        "diffusion.label_dropout=0.2",
        "truncated.accumulation=2",
        "diffusion.sample_every=0",
    ]
    guided = ["consistency.guidance=1.5", "consistency.teacher=diffusion"]
    network = VectorConfig(kind="vector_condition:VectorConfig")
    data = "data.path=vector_condition:HalvesData"
    return tiny_recipe(4, *words, *guided, data).model_copy(update={"network": network})


def belong_together(images: torch.Tensor, condition: object) -> bool:
    assert isinstance(condition, Vectors)
    halves = images[:, 0, 0, [0, -1]].float() / 127.5 - 1
    return torch.allclose(halves, condition.values, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_it_stays_with_its_images_in_any_process(workers: int) -> None:
    dataset = HalvesData()
    dataset.in_memory = False  # so that workers read it
    for loaded in islice(Batches(dataset, seed=0, batch=12, rank=1, world=2, workers=workers).starting_at(5), 3):
        assert loaded.images.shape == (6, 1, 8, 8)
        assert belong_together(loaded.images, loaded.condition)


def test_it_stays_with_its_images_in_a_stream() -> None:
    stream = open_data("stream:vector_condition:HalvesStream")
    assert isinstance(stream, Stream)
    check_data(make_recipe(), stream)
    seen = set()
    for loaded in islice(StreamBatches(stream, seed=0, batch=16).starting_at(0), 5):
        assert isinstance(loaded.condition, Vectors)
        assert belong_together(loaded.images, loaded.condition)
        seen |= set(map(tuple, loaded.condition.values.tolist()))
    assert len(seen) == len(np.unique(HalvesData().pixels(np.arange(80)), axis=0)), "all of an epoch"


def test_it_comes_along_with_a_data_set() -> None:
    dataset = HalvesData()
    assert dataset.condition_kind == KIND
    colour = with_channels(dataset, 3)
    for copy in (pickle.loads(pickle.dumps(dataset)), in_memory(dataset), colour):
        images, condition = copy.read(np.array([7, 3]))
        assert belong_together(torch.from_numpy(images), condition)
    other = ArrayDataset(dataset.pixels(np.arange(80)), dataset.annotations.select(np.arange(80)[::-1]))
    assert len({made.content_hash() for made in (dataset, other, HalvesData())}) == 2
    with pytest.raises(TcmError, match=r"79 annotations \(vectors of 2 numbers\) for 80 images; give one per image"):
        ArrayDataset(dataset.pixels(np.arange(80)), dataset.annotations.select(np.arange(79)))
    with pytest.raises(
        TcmError, match=r"with vectors of 2 numbers, but a \.zip and shards can hold only classes and captions; use"
    ):
        Preparation(dataset, Form((8, 8), Crop.CENTER))


def test_what_the_data_commands_say_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["data", "info", "vector_condition:HalvesData"], catch_exceptions=False)
    assert "vectors of 2 numbers" in printed.output
    found = CliRunner().invoke(app, ["data", "info", "vector_condition:HalvesData", "--json"], catch_exceptions=False)
    assert json.loads(found.stdout)["condition"] == {"width": 2, "kind": "vector_condition:VectorKind"}
    with pytest.raises(
        TcmError, match=r"vectors of 2 numbers, but a \.zip and shards can hold only classes and captions"
    ):
        CliRunner().invoke(app, ["data", "prepare", "vector_condition:HalvesData", "a.zip"], catch_exceptions=False)
    assert not Path("a.zip").exists()


def test_it_stays_with_its_images_in_micro_batches() -> None:
    recipe, dataset = make_recipe(), HalvesData()
    stage = recipe.stages["diffusion"]
    card = card_of(recipe, "diffusion", dataset.shape, dataset.condition_kind)
    roles = {"student": roles_of(recipe, "diffusion")["student"]}
    models = {"student": Model.fresh(card).denoiser}
    edges = time_bins(recipe.t_min, recipe.t_max)
    trainer = Trainer(stage, stage.build(recipe), models, roles, ALONE, (0, "diffusion"), edges)
    parts = list(trainer.micro_batches(Batches(dataset, seed=0, batch=16).at(3), 3))
    assert [len(batch.x) for batch, _ in parts] == [6, 5, 5]
    for batch, _ in parts:
        assert belong_together((batch.x + 1) * 127.5, batch.condition)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages, with dropped conditions and guidance."""
    folder = tmp_path_factory.mktemp("vectors") / "run"
    train(make_recipe(), folder)
    return folder


def test_its_cost_is_counted_beside_diffusers() -> None:
    """Once that is imported, torch decomposes what is counted, and refuses to mix devices."""
    pytest.importorskip("diffusers.models.unets.unet_2d_condition")
    network_cost.cache_clear()
    assert network_cost(VectorConfig(kind="vector_condition:VectorConfig"), (1, 8, 8), KIND).parameters == 10 + 64 * 3


def test_a_recipe_says_what_the_data_must_have(tmp_path: Path) -> None:
    recipe = make_recipe()
    assert recipe.condition == KIND
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert resolve(str(tmp_path / "recipe.toml")) == recipe
    adapts = resolve("digits", ["adapts=true", "data.path=vector_condition:HalvesData"])
    assert (adapted(adapts).classes, adapted(adapts).condition) == (None, KIND)
    cost = estimate(recipe, recipe.stages["diffusion"])
    assert cost.parameters == 10 + 64 * 3
    other = recipe.model_copy(update={"condition": VectorKind(3)})
    with pytest.raises(TcmError, match="HalvesData has vectors of 2 numbers, but condition is vectors of 3 numbers"):
        train(other, tmp_path / "run")
    bare = ArrayDataset(HalvesData().pixels(np.arange(80)))
    with pytest.raises(
        TcmError, match=r"has no annotations \(vectors of 2 numbers\); add them or set conditional=false"
    ):
        check_data(recipe, bare)
    with pytest.raises(TcmError, match="classes=10 and condition=vectors of 2 numbers cannot both be given; give one"):
        resolve(str(tmp_path / "recipe.toml"), ["classes=10"])
    with pytest.raises(TcmError, match=r"condition.widht is not a known key; did you mean 'width'\?"):
        resolve("digits", ["classes=none", "condition={kind='vector_condition:VectorKind', widht=2}"])


def test_its_kind_is_in_the_card(run: Path) -> None:
    folder = run / "2-truncated" / "model"
    written = json.loads((folder / "config.json").read_text())["condition"]
    assert written == {"kind": "vector_condition:VectorKind", "width": 2}
    assert inspect(folder).condition == KIND
    fields = json.loads((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"'nowhere:Kind' would run .* set TCM_TRUST=nowhere"):
        ModelCard.model_validate(fields | {"condition": {"kind": "nowhere:Kind"}})


def test_samples_follow_what_a_user_chose(run: Path) -> None:
    model = Model.load(run / "2-truncated" / "model")
    bright, dark = (model.sample(3, labels=text) for text in ("1,1", "-1,-1"))
    assert not torch.allclose(bright, dark)
    again = model.sample(3, condition=Vectors(torch.ones(3, 2)))
    torch.testing.assert_close(again, bright)
    (images,) = generate(model, range(3), Sampling(choice="1,1"), batch=8)
    assert images.shape == (3, 1, 8, 8)
    assert Sampling(steps=1, choice="1,1").describe(model).endswith(", 1.00; 1.00, fp32")
    assert model.sample(2).shape == (2, 1, 8, 8)
    with pytest.raises(TcmError, match="this model takes vectors of 2 numbers"):
        model.sample(1, condition=Vectors(torch.ones(1, 3)))


def test_it_is_measured(run: Path) -> None:
    model, dataset = Model.load(run / "2-truncated" / "model"), HalvesData()
    reference = reference_of(dataset, "halves", load_detector("digits"))
    scores = evaluate_model(model, "m", range(80), Sampling(steps=1), reference)
    scores += denoising_distances(
        model_denoise(model), dataset, [1.0], reference, model_subject(model, "m", None, 0), 80
    )
    assert all(np.isfinite(score.value) for score in scores)

    def from_the_data(seeds: Sequence[int]) -> Condition:
        return dataset.annotations.condition(np.array(seeds) % dataset.count)

    given = evaluate_model(model, "m", range(80), Sampling(steps=1), reference, condition=from_the_data)
    expected = to_uint8(model.sample(seeds=range(80), condition=from_the_data(range(80))))
    found = torch.cat(list(generate(model, range(80), Sampling(steps=1), 32, from_the_data)))
    assert int((found.int() - expected.int()).abs().max()) <= 1
    assert given[0].value != scores[0].value
    assert (given[0].sampling, given[0].conditions) == ("times 10, fp32", "given")
    with pytest.raises(TcmError, match="labels=1,1 and a condition cannot both be given"):
        next(generate(model, range(2), Sampling(choice="1,1"), 2, from_the_data))
    with pytest.raises(
        TcmError, match="the model takes vectors of 2 numbers, but the data has Labels that do not fit; give"
    ):
        denoising_distances(
            model_denoise(model), open_dataset("digits"), [1.0], reference, model_subject(model, "m", None, 0), 80
        )
    cost = network_cost(model.card.network, model.card.image_shape, model.card.condition)
    assert cost.parameters == 10 + 64 * 3


def test_it_is_measured_on_the_command_line(run: Path, tmp_path: Path) -> None:
    """With the vectors of the data."""
    words = ["--data", "vector_condition:HalvesData", "--detector", "digits", "-n", "80", "--data-conditions"]
    folder, scores = run / "2-truncated" / "model", tmp_path / "scores.jsonl"
    result = CliRunner().invoke(app, ["eval", str(folder), *words, "--scores", str(scores)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    model, dataset = Model.load(folder), HalvesData()
    reference = reference_of(dataset, "halves", load_detector("digits"))
    (truth,) = evaluate_model(model, "m", range(80), Sampling(), reference, condition=conditions_of(dataset))
    assert read_scores(scores)[0].value == pytest.approx(truth.value, rel=1e-6)


def test_its_run_is_measured(run: Path) -> None:
    """The run's recipe names the class of the data, and that is enough."""
    plan = MeasurementPlan("digits", 80, times=(1.0,))
    assert measure_stage(make_recipe(), run, "truncated", plan, lambda message: None, StopRequest(patient=True))
    scores = read_scores(run / "scores.jsonl")
    assert {score.kind for score in scores} == {"fid"}
    assert [score.t for score in scores] == [None, None, 1.0]
    recipe = resolve(str(run / "recipe.toml"))
    assert "truncated" not in unmeasured_stages(recipe, run, plan)
    owed = replace(scores[1], detector_hash="0" * 64)  # of as many samples, in another detector's features
    write_text(run / "scores.jsonl", "")
    append_scores(run / "scores.jsonl", [scores[0], owed, scores[2]])
    assert "truncated" in unmeasured_stages(recipe, run, plan)
    assert measure_stage(make_recipe(), run, "truncated", plan, lambda message: None, StopRequest(patient=True))
    *before, last = read_scores(run / "scores.jsonl")
    assert before == [scores[0], owed, scores[2]]
    assert (last.sampling, last.detector_hash) == (scores[1].sampling, scores[1].detector_hash)


def test_it_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = CliRunner().invoke(app, ["report", str(run)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    page = (run / "report.html").read_text("utf-8")
    assert "Each condition" in page
    for caption in ("-1.00; -1.00", "-0.33; -0.33", "1.00; 1.00"):
        assert caption in page
    assert "cannot be opened" not in page
    assert "nearest by pixels" in page


def test_scores_under_the_data_s_conditions_are_in_the_headline(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model measured in no other way has been measured."""
    words = ["--data", "vector_condition:HalvesData", "--detector", "digits", "-n", "80", "--data-conditions"]
    copy = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("scores.jsonl")))
    file = copy / "scores.jsonl"
    for stage in ("1-consistency", "2-truncated"):
        options = [str(copy / stage / "model"), *words, "--scores", str(file)]
        assert CliRunner().invoke(app, ["eval", *options], catch_exceptions=False).exit_code == 0
    rows = headline_rows([observe_run(read_run(copy))])
    found = {(row.stage.name, row.evaluations): row.score and row.score.value for row in rows}
    first, second = (score.value for score in read_scores(file))
    assert (found["consistency", 1], found["truncated", 1]) == (first, second)
    assert found["truncated", 2] is None
    assert "--data-conditions" in rows[-1].command

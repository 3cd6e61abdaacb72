"""Scores of variants and of kept checkpoints: the right models, measured once, and resumed."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from measured_study import NEVER, ignore

from tcm.data import open_dataset
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import evaluate_model, model_subject
from tcm.evaluation.features import load_detector
from tcm.evaluation.generation import Sampling
from tcm.evaluation.references import reference_of
from tcm.evaluation.scores import append_scores, read_scores
from tcm.foundation.errors import TcmError
from tcm.foundation.signals import StopRequest
from tcm.recipes.folders import stage_folders
from tcm.studies.common_stages import shared_stages
from tcm.studies.folders import MEASURED_FILE, noted_study, prepare, run_folder, share_stages
from tcm.studies.measuring import measure_variant, subjects_of
from tcm.studies.results import read_study
from tcm.studies.running import all_variants
from tcm.studies.schema import Quantity, Variant
from tcm.training.checkpoint import averaged_model, kept_checkpoints
from tcm.weights import Model
from tcm.weights.card import read_card


def variant_of(folder: Path, name: str, seed: int) -> tuple[Variant, Path]:
    """A variant and the folder of its run."""
    found = next(one for one in all_variants(noted_study(folder)) if (one.name, one.seed) == (name, seed))
    return found, run_folder(folder, found)


def noted_with_stage(variant: Variant, run: Path) -> Path:
    """The scores of a variant's stage, for all who share it."""
    return stage_folders(variant.recipe, run)[variant.stage] / "scores.jsonl"


def test_scores_are_those_of_tcm_eval(study_folder: Path) -> None:
    """The final model and its denoising, with the sampling seeds of the training seed."""
    variant, run = variant_of(study_folder, "t' = 1", 1)
    model = Model.load(stage_folders(variant.recipe, run)["truncated"] / "model")
    dataset = open_dataset("digits")
    reference = reference_of(dataset, "digits", load_detector("digits"))
    expected = [
        *evaluate_model(model, "truncated", range(80, 160), Sampling(steps=1), reference),
        *evaluate_model(model, "truncated", range(80, 160), Sampling(steps=2), reference),
    ]
    subject = model_subject(model, "truncated", None, 80)
    expected += denoising_distances(model_denoise(model), dataset, (0.2, 5.0), reference, subject, 80)
    found = [score for score in read_scores(run / "scores.jsonl") if score.subject == "truncated"]
    assert [(score.sampling, score.t, score.seed) for score in found] == [
        (score.sampling, score.t, score.seed) for score in expected
    ]
    assert [score.value for score in found] == pytest.approx([score.value for score in expected])


def test_a_checkpoint_gives_the_averaged_weights(study_folder: Path) -> None:
    """The last one is the stage's model, and the first is the model that the stage began with."""
    variant, run = variant_of(study_folder, "t' = 1", 0)
    folders = stage_folders(variant.recipe, run)
    folder = folders["truncated"]
    card, checkpoints = read_card(folder / "model" / "config.json"), kept_checkpoints(folder / "state")
    assert list(checkpoints) == [0, 2, 4]
    for step, expected in ((4, folder / "model"), (0, folders["consistency"] / "model")):
        found = averaged_model(checkpoints[step], card).denoiser.state_dict()
        weights = Model.load(expected).denoiser.state_dict()
        assert all(torch.equal(found[name], weights[name]) for name in weights)
    between = averaged_model(checkpoints[2], card).denoiser.state_dict()
    assert any(not torch.equal(between[name], weights[name]) for name in weights)


def test_a_damaged_checkpoint_is_named(study_folder: Path, tmp_path: Path) -> None:
    variant, run = variant_of(study_folder, "t' = 1", 0)
    folder = stage_folders(variant.recipe, run)["truncated"]
    shutil.copytree(folder / "state" / "step-2", tmp_path / "step-2")
    (file,) = (tmp_path / "step-2").glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(TcmError, match=r"step-2 is damaged .* does not match its checksum"):
        averaged_model(tmp_path / "step-2", read_card(folder / "model" / "config.json"))


def test_variants_begin_with_the_curves_of_their_own_stages(study_folder: Path) -> None:
    """So that two workers measure two stages instead of waiting for the same one."""
    study = noted_study(study_folder)
    study = study.model_copy(
        update={"measure": study.measure.model_copy(update={"curve": ("consistency", "truncated")})}
    )
    for name, order in (("stage 1", ["consistency", "truncated"]), ("t' = 1", ["truncated", "consistency"])):
        subjects = subjects_of(study, *variant_of(study_folder, name, 0))
        assert list(dict.fromkeys(subject.stage for subject in subjects if subject.step is not None)) == order


def test_curves_are_measured_at_each_kept_checkpoint(study_folder: Path) -> None:
    _, run = variant_of(study_folder, "t' = 4", 0)
    subjects = [(score.subject, score.step) for score in read_scores(run / "scores.jsonl")]
    names = [("truncated", None), ("truncated@0", 0), ("truncated@2", 2), ("truncated@4", 4)]
    assert subjects == [name for name in names for _ in range(4)]
    assert (run / MEASURED_FILE).exists()


def test_only_what_is_missing_is_measured(study_folder: Path, tmp_path: Path) -> None:
    """After an interruption the scores that are there stay, line by line."""
    out = tmp_path / "out"
    shutil.copytree(study_folder, out)
    variant, run = variant_of(out, "t' = 4", 0)
    lines = (run / "scores.jsonl").read_text().splitlines(keepends=True)
    (run / "scores.jsonl").write_text("".join(lines[:5] + lines[6:]))
    (run / MEASURED_FILE).unlink()
    noted_with_stage(variant, run).unlink()
    assert measure_variant(noted_study(out), variant, run, ignore, NEVER)
    again = (run / "scores.jsonl").read_text().splitlines(keepends=True)
    assert again[:-1] == lines[:5] + lines[6:]
    before = read_scores(study_folder / run.relative_to(out) / "scores.jsonl")[5]
    after = read_scores(run / "scores.jsonl")[-1]
    assert (after.subject, after.t, after.sampling) == (before.subject, before.t, before.sampling)
    assert after.value == pytest.approx(before.value)
    assert (run / MEASURED_FILE).exists()


def test_scores_under_given_conditions_are_not_the_study_s(study_folder: Path, tmp_path: Path) -> None:
    """`tcm eval --data-conditions` may have written them into the same file."""
    out = tmp_path / "out"
    shutil.copytree(study_folder, out)
    variant, run = variant_of(out, "t' = 4", 0)
    first, *others = read_scores(run / "scores.jsonl")
    assert first.conditions == "drawn"
    (run / "scores.jsonl").unlink()
    noted_with_stage(variant, run).unlink()
    append_scores(run / "scores.jsonl", [*others, replace(first, conditions="given", value=-1.0)])
    (trial,) = (one for one in read_study(out).trials if run_folder(out, one.variant) == run)
    assert Quantity("fid", steps=1) not in trial.scores
    assert measure_variant(noted_study(out), variant, run, ignore, NEVER)
    assert read_scores(run / "scores.jsonl")[-1].value == pytest.approx(first.value)


def test_a_shared_stage_is_measured_once(study_folder: Path) -> None:
    """The variants `t' = 1` and `stage 1` have the same truncated stage: the second takes over the first's scores."""
    first, second = (
        [
            score
            for score in read_scores(variant_of(study_folder, name, 0)[1] / "scores.jsonl")
            if score.step is not None
        ]
        for name in ("t' = 1", "stage 1")
    )
    assert first == second, "and the times at which they were measured"


def test_studies_that_share_a_stage_share_its_scores(study_folder: Path, tmp_path: Path) -> None:
    """A second study of the same stages takes over what was measured alike, and measures only what was not."""
    shutil.copytree(study_folder / "stages", tmp_path / "stages")
    study = noted_study(study_folder)
    measure = study.measure.model_copy(update={"dfid": (0.2, 1.0), "curve": ()})
    for name, other in (
        ("alike", study.model_copy(update={"measure": measure})),
        ("fewer", study.model_copy(update={"measure": measure.model_copy(update={"reference_count": 100})})),
    ):
        out = tmp_path / name
        out.mkdir()
        share_stages(out, tmp_path / "stages")
        variants = all_variants(other)
        prepare(other, variants, shared_stages(other, variants).values(), out)
        variant, run = variant_of(out, "t' = 4", 1)
        assert measure_variant(other, variant, run, ignore, NEVER)
    before, alike, fewer = (
        {(score.sampling, score.t): score for score in read_scores(file) if score.step is None}
        for out in (study_folder, tmp_path / "alike", tmp_path / "fewer")
        for file in [variant_of(out, "t' = 4", 1)[1] / "scores.jsonl"]
    )
    assert {way: before.get(way) == score for way, score in alike.items()} == {
        ("times 80, fp32", None): True,
        ("times 80, 4, fp32", None): True,
        (None, 0.2): True,
        (None, 1.0): False,
    }
    assert {score.reference_count for score in fewer.values()} == {100}


def test_asked_to_stop_it_stops(study_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(study_folder, out)
    variant, run = variant_of(out, "t' = 4", 0)
    (run / "scores.jsonl").unlink()
    (run / MEASURED_FILE).unlink()
    noted_with_stage(variant, run).unlink()
    stop = StopRequest(patient=True)
    stop.by = "SIGTERM"
    assert not measure_variant(noted_study(out), variant, run, ignore, stop)
    assert not (run / MEASURED_FILE).exists()

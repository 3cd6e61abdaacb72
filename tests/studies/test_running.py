"""Studies carried out in real processes: stages shared, killed, failing, in parts; the same bytes as `tcm train`."""

import json
import shutil
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from launching import fingerprint
from once import once
from rich.console import Console
from tiny_study import Started, carry_out, overrides, write_study

import tcm
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.processes import Processes
from tcm.foundation.progress import SentProgress
from tcm.foundation.signals import StopRequest
from tcm.recipes.decided import DECIDED_FILE, settled
from tcm.recipes.folders import stage_folders
from tcm.recipes.resolve import resolve
from tcm.report.records import read_run
from tcm.studies.common_stages import shared_stages
from tcm.studies.folders import noted_study, prepare, run_folder, share_stages, stage_folder
from tcm.studies.resolve import resolve_study
from tcm.studies.running import Part, all_variants
from tcm.training.run import Run
from tcm.training.starts import read_starts
from tcm.weights import last_model

pytestmark = pytest.mark.long

VARIANTS = {
    "broken": ["truncated.frozen=./no-such-model"],
    "t' = 1": [],
    "cannot be measured": {"overrides": [], "stage": "diffusion"},
    "t' = 0.5": ["truncated.t_prime=0.5"],
    "stage 1": {"overrides": [], "stage": "consistency"},
}
FAILING, FINE = Part(1, 2), Part(2, 2)


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that nothing disturbed; two of its variants fail."""

    def make(folder: Path) -> None:
        outcome, text = carry_out(write_study(folder / "study.toml", VARIANTS), folder / "out", workers=2)
        assert outcome.finished, text
        assert len(outcome.failures) == 2, text

    return once(tmp_path_factory, "study-of-two", make)


def decided_bytes(out: Path) -> dict[str, bytes]:
    """All bytes that a study's randomness and arithmetic decide."""
    measured = {str(path.relative_to(out)): path.read_bytes() for path in out.glob("runs/*/*/measured")}
    return fingerprint(out / "stages") | measured


def starts(out: Path) -> Counter[tuple[str, int]]:
    """How many stages of each name were begun how many times."""
    folders = (out / "stages").iterdir()
    return Counter((folder.name.rpartition("-")[0], len(read_starts(folder))) for folder in folders)


def test_stages_in_common_are_trained_once(done: Path) -> None:
    """One stage 0, one stage 1, two of stage 2; the one that is broken never began."""
    counts = {("diffusion", 1): 1, ("consistency", 1): 1, ("truncated", 1): 2, ("truncated", 0): 1}
    assert starts(done / "out") == counts
    assert {path.parent.name for path in done.glob("out/runs/seed-0/*/measured")} == {"t-1", "t-0.5", "stage-1"}


def test_a_failing_variant_stops_no_other(done: Path) -> None:
    """Not even the stages that it has in common with others, although it comes first."""
    runs, text = done / "out" / "runs" / "seed-0", (done / "out.log").read_text()
    assert {path.parent.name for path in runs.glob("*/failed.json")} == {"broken", "cannot-be-measured"}
    measuring = json.loads((runs / "cannot-be-measured" / "failed.json").read_text())
    assert measuring == {"stage": "measuring", "error": "detector=none; name one", "diverged": False}
    training = json.loads((runs / "broken" / "failed.json").read_text())
    assert training["stage"] == "truncated"
    assert "no-such-model" in training["error"]
    assert "seed-0/cannot-be-measured, measuring: failed: detector=none; name one" in text
    assert "variants: 3 done, 2 failed, 0 running, 0 waiting\n" in text


def test_a_variant_is_bit_identical_to_its_training_alone(done: Path, one_thread: None, tmp_path: Path) -> None:
    recipe = resolve("digits", [*overrides(), "truncated.t_prime=0.5", "seed=0"])
    Run(recipe, tmp_path / "alone", Processes(torch.device("cpu")), Console(quiet=True)).train()
    run = done / "out" / "runs" / "seed-0" / "t-0.5"
    (tmp_path / "shared").mkdir()
    for number, (stage, folder) in enumerate(json.loads((run / "elsewhere.json").read_text()).items()):
        (tmp_path / "shared" / f"{number}-{stage}").symlink_to((run / folder).resolve())
    expected = fingerprint(tmp_path / "alone")
    assert sum("model.safetensors" in name for name in expected) == 3
    assert fingerprint(tmp_path / "shared") == expected
    assert (run / "recipe.toml").read_text() == (tmp_path / "alone" / "recipe.toml").read_text()


def test_what_a_run_decides_by_itself_is_decided_alike(tmp_path: Path) -> None:
    """A stage that ends when it is flat, and a t' that is chosen by it; here one process trains them all."""
    words = [*overrides(12), "consistency.until_flat=true", "truncated.t_prime=auto"]
    here = Processes(torch.device("cpu")), Console(quiet=True)
    recipe, out = resolve("digits", words), tmp_path / "out"
    Run(recipe, tmp_path / "alone", *here).train()
    study = resolve_study(write_study(tmp_path / "study.toml", {"auto": words[-2:]}, steps=12))
    (variant,) = all_variants(study)
    stages = shared_stages(study, [variant])
    prepare(study, [variant], stages.values(), out)
    for stage in stages.values():
        training = Run(stage.recipe, stage_folder(out, stage.key), *here)
        assert training.train_only(stage.name, partial(SentProgress, lambda _: None), StopRequest(patient=True))
    shared, alone = stage_folders(variant.recipe, run_folder(out, variant)), stage_folders(recipe, tmp_path / "alone")
    decided = [name for name in shared if (shared[name] / DECIDED_FILE).exists()]
    assert "truncated" in decided
    for name in shared:
        files = [f"model/{file}" for file in ("config.json", "model.safetensors")]
        for file in [*files, DECIDED_FILE] if name in decided else files:
            assert (shared[name] / file).read_bytes() == (alone[name] / file).read_bytes()
    assert settled(variant.recipe, run_folder(out, variant)) == settled(recipe, tmp_path / "alone")


def test_a_variants_folder_is_a_run(done: Path) -> None:
    """What reads runs reads it; what trains them refuses it, for others share its stages."""
    run = done / "out" / "runs" / "seed-0" / "t-0.5"
    assert tcm.load(run).card.t_min == 0.5
    assert last_model(run).parent.parent == (done / "out" / "stages").resolve()
    record = read_run(run)
    assert [stage.name for stage in record.stages] == ["diffusion", "consistency", "truncated"]
    assert all(stage.lines for stage in record.stages)
    training = Run(record.recipe, run, Processes(torch.device("cpu")), Console(quiet=True))
    with pytest.raises(TcmError, match="shares its stages with other runs of a study; train it with `tcm study run`"):
        training.train()


def test_studies_share_stages(done: Path, tmp_path: Path) -> None:
    """A second study trains only what the first has not, and measures by itself."""
    out, stages = tmp_path / "second", tmp_path / "stages"
    shutil.copytree(done / "out" / "stages", stages)
    share_stages(out, stages)
    outcome, text = carry_out(
        write_study(tmp_path / "second.toml", {"t' = 1": [], "t' = 2": ["truncated.t_prime=2"]}), out
    )
    assert outcome.finished, text
    assert not outcome.failures, text
    assert starts(tmp_path) == starts(done / "out") + Counter({("truncated", 1): 1})
    measured = Path("runs", "seed-0", "t-1", "measured")
    assert (out / measured).read_bytes() == (done / "out" / measured).read_bytes()
    assert tcm.load(out / "runs" / "seed-0" / "t-2").card.t_min == 2.0
    with pytest.raises(TcmError, match=f"the study's stages are in {stages}; leave it out, or use another --out"):
        share_stages(out, tmp_path / "others")
    (tmp_path / "file").touch()
    with pytest.raises(TcmError, match="cannot be linked as"):
        share_stages(tmp_path / "third", tmp_path / "file")


def test_two_studies_that_share_stages_at_once(tmp_path: Path) -> None:
    """The second notes its own recipe in a stage's folder while the first has yet to train the stage."""
    (tmp_path / "mine.toml").write_text('extends = "digits"\nsecond_time = 3.0\n')
    first = write_study(tmp_path / "first.toml", {"t' = 1": []}, steps=8)
    second = write_study(tmp_path / "second.toml", {"t' = 2": ["truncated.t_prime=2"]}, steps=8)
    second.write_text(second.read_text().replace('base = "digits"', 'base = "mine.toml"'))
    for name in ("one", "two"):
        share_stages(tmp_path / name, tmp_path / "stages")
    running = Started(first, tmp_path / "one")
    running.until(tmp_path, "stages/diffusion-*/state/step-*")
    outcome, text = carry_out(second, tmp_path / "two")
    assert (running.wait(), outcome.finished, outcome.failures) == (0, True, {}), text
    assert starts(tmp_path) == {("diffusion", 1): 1, ("consistency", 1): 1, ("truncated", 1): 2}


def test_a_curve_of_a_stage_that_another_study_trained(done: Path, tmp_path: Path) -> None:
    """Its missing checkpoints are counted; with all of them, nothing is said."""
    shutil.copytree(done / "out" / "stages", tmp_path / "stages")
    share_stages(tmp_path / "second", tmp_path / "stages")
    study = resolve_study(write_study(tmp_path / "second.toml", {"t' = 1": []}))
    study = study.model_copy(update={"measure": study.measure.model_copy(update={"curve": ("consistency",)})})
    variants = all_variants(study)
    stages = shared_stages(study, variants).values()
    prepare(study, variants, stages, tmp_path / "second")
    (key,) = (stage.key for stage in stages if stage.name == "consistency")
    checkpoint, *_ = (tmp_path / "stages" / key / "state").glob("step-*")
    shutil.rmtree(checkpoint)
    with pytest.warns(TcmWarning, match=r"has \d of \d checkpoints, since another study trained it"):
        prepare(study, variants, stages, tmp_path / "second")


def test_what_is_done_is_not_done_again(done: Path) -> None:
    begun = (done / "out.log").read_text().count(": begins")
    outcome, text = carry_out(done / "study.toml", done / "out", part=FINE)
    assert outcome.finished
    assert not outcome.failures
    assert text.count(": begins") == begun


def test_two_parts_at_once_killed_and_resumed(done: Path, tmp_path: Path) -> None:
    """Both need stages 0 and 1. In the middle of stage 1 one is killed, the other interrupted; then both resume."""
    study, out = done / "study.toml", tmp_path / "out"
    parts = [Started(study, out, part=part) for part in (FINE, FAILING)]
    parts[0].until(out, "stages/consistency-*/state/step-*")
    parts[0].send(signal.SIGKILL)
    parts[1].send(signal.SIGINT)
    assert [part.wait() for part in parts] == [-signal.SIGKILL, 1]
    assert not list(out.glob("stages/consistency-*/model"))
    assert not list(out.glob("runs/*/broken/failed.json")), "being interrupted is no failure"
    parts = [Started(study, out, part=part) for part in (FINE, FAILING)]
    assert [part.wait() for part in parts] == [0, 1]
    assert decided_bytes(out) == decided_bytes(done / "out")
    once_each = {("diffusion", 1): 1, ("truncated", 1): 2, ("truncated", 0): 1}
    assert {key: count for key, count in starts(out).items() if key[0] != "consistency"} == once_each


def test_another_study_is_refused(done: Path, tmp_path: Path) -> None:
    other = write_study(tmp_path / "study.toml", {"t' = 1": []})
    with pytest.raises(TcmError, match=r"out holds another study \(with other variants\); choose another --out"):
        carry_out(other, done / "out")
    renamed = write_study(tmp_path / "renamed.toml", VARIANTS)
    with pytest.raises(TcmError, match=r"out holds another study \(study\); choose another --out"):
        carry_out(renamed, done / "out")


def test_what_is_measured_may_be_corrected_until_something_is(tmp_path: Path) -> None:
    """A misspelled detector is found before anything is trained."""
    path = write_study(tmp_path / "study.toml", {"t' = 1": []})
    path.write_text(path.read_text() + '[measure]\ndetector = "digit"\n')
    with pytest.raises(TcmError, match="detector='digit' is not known; use inception, digits"):
        carry_out(path, tmp_path / "out")
    study = resolve_study(path)
    variants = all_variants(study)
    for count in (100, 200):
        study = study.model_copy(update={"measure": study.measure.model_copy(update={"count": count})})
        prepare(study, variants, [], tmp_path / "out")
    (run_folder(tmp_path / "out", variants[0]) / "scores.jsonl").touch()
    study = study.model_copy(update={"measure": study.measure.model_copy(update={"count": 300})})
    with pytest.raises(TcmError, match=r"another study \(with other measure\)"):
        prepare(study, variants, [], tmp_path / "out")


def test_a_study_of_a_recipe_of_ones_own_may_be_moved(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (here / "mine.toml").write_text('extends = "digits"\nt_max = 40.0\n')
    path = write_study(here / "study.toml", {"t' = 1": []})
    path.write_text(path.read_text().replace('base = "digits"', 'base = "mine.toml"'))
    study = resolve_study(path)
    prepare(study, all_variants(study), [], here / "out")
    prepare(study, all_variants(study), [], here / "out")
    here.rename(there)
    (there / "mine.toml").unlink()
    moved = noted_study(there / "out")
    assert resolve(moved.base).t_max == 40.0
    prepare(moved, all_variants(moved), [], there / "out")
    (there / "mine.toml").write_text('extends = "digits"\nt_max = 50.0\n')
    changed = resolve_study(there / "study.toml")
    with pytest.raises(TcmError, match=r"another study \(with other base\)"):
        prepare(changed, all_variants(changed), [], there / "out")


def test_stages_that_were_moved_are_asked_for(tmp_path: Path) -> None:
    study, out = resolve_study(write_study(tmp_path / "study.toml", {"t' = 1": []})), tmp_path / "out"
    share_stages(out, tmp_path / "stages")
    (tmp_path / "stages").rename(tmp_path / "moved")
    with pytest.raises(TcmError, match=r"stages leads to .*stages, which is not there; say where"):
        prepare(study, all_variants(study), [], out)
    share_stages(out, tmp_path / "moved")
    prepare(study, all_variants(study), [], out)


def test_seeds_may_be_added(tmp_path: Path) -> None:
    """And the words of a study may change, but not a recipe."""
    study = resolve_study(write_study(tmp_path / "study.toml", {"t' = 1": []}, seeds=(3,)))
    for seeds in ((3,), (5, 3), (4,)):
        more = study.model_copy(update={"seeds": seeds})
        variants = all_variants(more)
        prepare(more, variants, shared_stages(more, variants).values(), tmp_path / "out")
        study = study.model_copy(update={"claim": "Other words."})
    noted = noted_study(tmp_path / "out")
    assert (noted.seeds, noted.claim) == ((3, 5, 4), "Other words.")
    assert sorted(path.parent.name for path in tmp_path.glob("out/runs/*/t-1")) == ["seed-3", "seed-4", "seed-5"]
    assert len(list(tmp_path.glob("out/stages/*/recipe.toml"))) == 3 * 3
    other = [replace(one, recipe=one.recipe.model_copy(update={"sigma_data": 0.5})) for one in variants]
    with pytest.raises(TcmError, match=r"another recipe \(sigma_data: 0.75 → 0.5\); choose another --out"):
        prepare(more, other, [], tmp_path / "out")

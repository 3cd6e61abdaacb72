"""Stages that learn by tangents: two processes against one, shared weights, a resumed run, half precision."""

import re
from pathlib import Path

import pytest
import torch
from inprocess import begin, train, unchanged
from launching import Launcher, losses, tiny, tiny_recipe

import tcm
from tcm.evaluation.generation import Sampling
from tcm.foundation.errors import TcmError
from tcm.method.joined import Joined
from tcm.recipes.folders import stage_folders
from tcm.recipes.resolve import resolve
from tcm.studies.measuring import Subject, load_subject
from tcm.studies.resolve import resolve_study

STAGES = ("consistency", "truncated")
FOLDERS = ("1-consistency", "2-truncated")
WORDS = [
    'order=["consistency", "truncated"]',
    "consistency.init=scratch",
    # When stage 2 begins, student and frozen model differ at t' by rounding alone; a small c makes a direction of it.
    "truncated.distance.c=0.06",
    *(f"{stage}.{word}" for stage in STAGES for word in ("teacher=none", "target=tangent", "log_every=1")),
    *(f"{stage}.{word}" for stage in STAGES for word in ("sample_every=0", "checkpoint_every=100")),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process's run, with a companion."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train(tiny_recipe(3, *WORDS, "truncated.companion=true"), run)
    return run


def test_the_companion_is_the_frozen_model(alone: Path) -> None:
    model, stage_1 = tcm.load(alone), tcm.load(alone / "1-consistency" / "model")
    assert isinstance(model.denoiser, Joined)
    frozen = stage_1.denoiser.state_dict()
    assert all(torch.equal(frozen[name], own) for name, own in model.denoiser.companion.state_dict().items())
    assert model.card.companion is not None
    assert (model.card.t_min, model.denoiser.t_min) == (1.0, 0.002)
    assert model.card.provenance.data == model.card.companion.provenance.data is not None


def test_a_study_measures_with_the_companion_of_each_variant(alone: Path) -> None:
    """Variants with and without share their training, whichever of them trained it."""
    subject = Subject("truncated", None, 16)
    for companion in (False, True):
        recipe = tiny_recipe(3, *WORDS, f"truncated.companion={str(companion).lower()}")
        model = load_subject(recipe, stage_folders(recipe, alone), subject)
        assert isinstance(model.denoiser, Joined) == companion
        assert ("companion" in Sampling(steps=2).describe(model)) == companion


@pytest.mark.long
@pytest.mark.parametrize(("accumulation", "shard"), [(1, False), (2, False), (1, True)])
def test_two_processes_learn_what_one_does(
    launcher: Launcher, alone: Path, tmp_path: Path, accumulation: int, shard: bool
) -> None:
    """A derivative around a DistributedDataParallel module would skip the exchange of gradients without a word."""
    words = tiny(3, *WORDS, *(f"{stage}.accumulation={accumulation}" for stage in STAGES))
    arguments = ("train", "digits", *words, "--run", str(tmp_path / "run"), *(["--shard"] if shard else []))
    ended = launcher.run_ranks(2, *arguments)
    assert [code for code, _ in ended] == [0, 0], ended
    for folder in FOLDERS:
        for key in ("loss", "gradient_norm"):
            found = losses(tmp_path / "run" / folder, key)
            assert len(found) == 3
            assert found == pytest.approx(losses(alone / folder, key), rel=1e-4), (folder, key)


@pytest.mark.usefixtures("quick_look_at_rounding")
def test_a_stage_in_half_precision_resumes(tmp_path: Path) -> None:
    """Whole networks in bf16, weights in fp32: a resumed stage ends bit for bit as an undisturbed one."""
    words = ("consistency.target=tangent", "consistency.teacher=none", "consistency.precision=bf16")
    words += ("consistency.sample_every=0", "consistency.steps=3", "consistency.batch=8")
    ends = []
    for name in ("straight", "resumed"):
        (tmp_path / name).mkdir()
        loop, stop = begin(tmp_path / name, "consistency", unchanged, *words)
        if name == "resumed":
            stop.by = "SIGTERM"
            assert not loop.run(stop)
            loop, stop = begin(tmp_path / name, "consistency", unchanged, *words)
        assert loop.run(stop)
        ends.append(loop.trainer.tensors())
    assert all(tensor.dtype == torch.float32 for tensor in loop.trainer.student.state_dict().values())
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())


def test_the_examples_of_the_page(alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands name keys, recipes and studies that exist; the Python example runs."""
    page = (Path(__file__).parents[2] / "docs" / "tangents.md").read_text("utf-8")
    (commands,) = re.findall(r"```sh\n(.*?)```", page, flags=re.S)
    (python,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    for line in commands.splitlines():
        _, command, *words = line.partition("#")[0].split()
        match command:
            case "train":
                resolve(words[0], words[1 : words.index("--run")])
            case "recipes":
                resolve(words[1])
            case "study":
                resolve_study(words[1])
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "half").symlink_to(alone)
    monkeypatch.chdir(tmp_path)
    exec(python, {})
    assert tcm.load("without-companion/").card.companion is None


def test_a_network_that_knows_no_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["truncated.target=tangent", "truncated.precision=bf16"]
    resolve("digits", words)
    monkeypatch.setattr(tcm.DDPMppConfig, "computes_in_half", False)
    with pytest.raises(TcmError, match=r"truncated.precision='bf16' with target='tangent' needs a network that"):
        resolve("digits", words)
    resolve("digits", ["truncated.target=tangent"])


def test_a_second_time_below_t_prime_needs_a_companion() -> None:
    with pytest.raises(TcmError, match=r"second_time=0.5 must be at least 1, where the range of truncated begins"):
        resolve("digits", ["second_time=0.5"])
    assert resolve("digits", ["second_time=0.5", "truncated.companion=true"]).second_time == 0.5

"""A tiny pipeline distilled: all stages, killed and resumed, in two processes, on latents made ahead, as a LoRA."""

import json
import re
import shlex
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import LCMScheduler, StableDiffusionPipeline
from inprocess import train
from launching import Command, Launcher, fingerprint, losses
from PIL import Image
from safetensors.torch import load_file
from typer.testing import CliRunner

import tcm
from tcm.cli.main import app
from tcm.data import open_dataset
from tcm.data.encoded import EncodedDataset, StoredTexts
from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.curriculum import Curriculum
from tcm.recipes.resolve import resolve, to_toml
from tcm.recipes.schema import Recipe
from tcm.report.drawing import COLUMNS, observe_run
from tcm.report.records import read_run
from tcm.training.adapting import fitted_to
from tcm.training.run import RunOptions
from tcm.weights.pipeline_export import LORA_FOLDER

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("quick_look_at_rounding")]

STAGES = {"diffusion": "0-diffusion", "consistency": "1-consistency", "truncated": "2-truncated"}
TOML = """
extends = "sd15-coyo"
order = ["diffusion", "consistency", "truncated"]

[stages.diffusion]
objective = "diffusion"
init = "init"
label_dropout = 0.5
steps = 3
batch = 8
learning_rate = 1e-4
"""
SMALL = [
    *(f"*.{word}" for word in ("steps=3", "batch=8", "log_every=1", "checkpoint_every=2", "sample_every=0")),
    *(f"{stage}.{word}" for stage in ("consistency", "truncated") for word in ("accumulation=2", "warmup=0")),
    "*.precision=fp32",
    "*.accept_rounding=false",
    "consistency.init=init",  # so that each of the first two stages can be trained alone
    "consistency.watched_images=8",
    "consistency.curriculum.d=1",
    "condition.negative=fog",
    'condition.prompts=["red cat", "blue dog"]',
    "data.workers=0",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty captioned images of 64 × 64."""
    chance = np.random.default_rng(0)
    images = chance.integers(0, 256, (20, 64, 64, 3), np.uint8)
    captions = [f"{('red', 'blue', 'grey')[index % 3]} {('cat', 'dog')[index % 2]}" for index in range(20)]
    path = tmp_path_factory.mktemp("captioned") / "images.npz"
    np.savez(path, images=images, captions=np.array(captions))
    return path


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "tiny-sd.toml"
    path.write_text(TOML)
    return path


def recipe_of(written: Path, data: Path, pipeline: Path, *overrides: str) -> Recipe:
    words = [*SMALL, f"data.path={data}", *overrides]
    return fitted_to(resolve(str(written), words), str(pipeline))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, written: Path, data: Path, pipeline: Path) -> Path:
    """A run of all stages in this process, which nothing disturbed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    overrides = ("truncated.sample_every=3",)
    train(recipe_of(written, data, pipeline, *overrides), folder, RunOptions(init=str(pipeline)))
    return folder


def all_losses(run: Path, *stages: str) -> list[float]:
    return [loss for stage in stages or STAGES for loss in losses(next(run.glob(f"*-{stage}")))]


def test_all_stages(finished: Path, pipeline: Path, tmp_path: Path) -> None:
    """Each stage's model loads; the last one generates pixels and is exported; the recipe took what the pipeline is."""
    recipe = resolve(str(finished / "recipe.toml"))
    assert recipe.network.block_out_channels == (8, 16)
    assert (recipe.image_shape, recipe.latents.vae, recipe.condition.tokens) == ((4, 8, 8), str(pipeline), 16)
    assert recipe.condition.negative == "fog"
    assert recipe.condition.prompts == ("red cat", "blue dog"), "the recipe's own"
    assert len(all_losses(finished)) == 9
    assert np.isfinite(all_losses(finished)).all()
    assert (finished / STAGES["truncated"] / "samples" / "step-0000003.png").exists()
    kinds = [tcm.load(finished / folder / "model").card for folder in STAGES.values()]
    assert [card.kind for card in kinds] == list(STAGES)
    assert [card.t_min for card in kinds] == pytest.approx([0.02916716, 0.02916716, 2.0])
    model = tcm.load(finished)
    images = model.sample(prompts=["red cat", "dog"], steps=2)
    assert images.shape == (2, 3, 64, 64)
    assert float(images.abs().max()) <= 1
    out = tmp_path / "exported"
    ended = CliRunner().invoke(app, ["export", str(finished), "--to", "diffusers", "--out", str(out)])
    assert ended.exit_code == 0, ended.output
    assert "largest difference from torch" in ended.output
    assert "timesteps=[999, 563]" in (tmp_path / "exported" / "README.md").read_text()


def test_an_export_is_no_teacher(finished: Path, written: Path, data: Path, tmp_path: Path) -> None:
    """It is the truncated model, whose t' is not where the noise of its pipeline begins."""
    exported = str(tmp_path / "exported")
    ended = CliRunner().invoke(app, ["export", str(finished), "--to", "diffusers", "--out", exported])
    assert ended.exit_code == 0, ended.output
    recipe = fitted_to(resolve(str(written), [*SMALL, f"data.path={data}"]), exported)
    assert recipe.t_min == 0.0291672
    with pytest.raises(TcmError, match=r"consistency\.teacher=init is a consistency model, .* needs a diffusion model"):
        train(recipe, tmp_path / "run", RunOptions(init=exported))


def test_report(finished: Path) -> None:
    """Its grid begins with the pipeline itself, plain and guided as in the recipe, for the recipe's prompts."""
    observed = observe_run(read_run(finished))
    assert [way for way, _ in observed.origin.ways] == ["Heun", "Heun, guidance 6"]
    assert all(images.shape == (COLUMNS, 3, 64, 64) for _, images in observed.origin.ways)
    assert observed.drawings[-1].captions[:2] == ("red cat", "blue dog")


def killed_after(command: Command, run: Path, stage: str) -> None:
    """Kill a command once the checkpoint of step 2 of a stage is there, before the stage ends."""
    command.until(lambda: any(run.glob(f"{stage}/state/step-2/*")), patience=600)
    command.send(signal.SIGKILL)
    assert command.wait() == -signal.SIGKILL, command.text
    assert not (run / stage / "model").exists()


def test_killed_and_resumed(finished: Path, pipeline: Path, tmp_path: Path, launcher: Launcher) -> None:
    """Killed within stages 0 and 1, after a checkpoint, and resumed without --init: the same bits.

    test_lora kills stage 2.
    """
    run, path = tmp_path / "run", tmp_path / "same.toml"
    path.write_text(to_toml(resolve(str(finished / "recipe.toml"))))
    words = [str(path), "--init", str(pipeline), "--run", str(run)]
    for stage in list(STAGES.values())[:2]:
        killed_after(launcher.start("train", *words), run, stage)
        words = [str(run)]
    train(resolve(str(run / "recipe.toml")), run)
    assert fingerprint(run) == fingerprint(finished)


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        pytest.param((), ["consistency"], id="replicated"),
        pytest.param((), ["diffusion"], id="replicated diffusion", marks=pytest.mark.slow),
        pytest.param(("--shard",), ["consistency", "truncated"], id="sharded", marks=pytest.mark.slow),
    ],
)
def test_two_processes(
    finished: Path, pipeline: Path, tmp_path: Path, launcher: Launcher, options: tuple[str, ...], stages: list[str]
) -> None:
    """With the weights on both or shared by them, and blocks recomputed."""
    path = tmp_path / "same.toml"
    path.write_text(to_toml(resolve(str(finished / "recipe.toml"))))
    words = ("network.gradient_checkpointing=true", f"order={json.dumps(stages)}", "truncated.sample_every=0")
    arguments = ("train", str(path), *words[: 1 + len(stages)], "--init", str(pipeline), *options)
    ended = launcher.run_ranks(2, *arguments, "--run", str(tmp_path / "run"))
    assert [code for code, _ in ended] == [0, 0], ended
    assert all_losses(tmp_path / "run", *stages) == pytest.approx(all_losses(finished, *stages), rel=1e-3)


@pytest.mark.parametrize("texts", [False, True], ids=["captions", "embeddings"])
def test_latents_made_ahead(
    finished: Path, written: Path, data: Path, pipeline: Path, tmp_path: Path, texts: bool
) -> None:
    """The same losses as with images that are encoded during training; the folder says which encoders made it."""
    words = ["data", "prepare", str(data), str(tmp_path / "latents"), "--latents", str(pipeline), "--workers", "0"]
    ended = CliRunner().invoke(app, [*words, *(["--text-encoder", str(pipeline)] if texts else [])])
    assert ended.exit_code == 0, ended.output
    dataset = open_dataset(tmp_path / "latents")
    assert isinstance(dataset, EncodedDataset)
    assert isinstance(dataset.annotations, StoredTexts) == texts
    if texts:
        assert dataset.annotations.kind.prompts[:2] == ("red cat", "blue dog"), "samples are shown of these"
    assert (dataset.count, dataset.shape, dataset.pixels(np.arange(2)).dtype) == (20, (4, 8, 8), np.float16)
    assert list(dataset.captions)[:2] == ["red cat", "blue dog"]
    coloured = open_dataset(tmp_path / "latents", channels=3)
    assert coloured.shape == (4, 8, 8), "data.channels=3 is for images"
    assert np.array_equal(coloured.pixels(np.arange(20)), dataset.pixels(np.arange(20)))
    recipe = recipe_of(written, tmp_path / "latents", pipeline, 'order=["diffusion", "consistency"]')
    assert dataset.latents == recipe.latents
    options = RunOptions(init=str(pipeline))
    train(recipe, tmp_path / "run", options)
    stages = ("diffusion", "consistency")
    assert all_losses(tmp_path / "run", *stages) == all_losses(finished, *stages)
    if texts:
        report = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "report.html")])
        assert report.exit_code == 0, report.output
        page = (tmp_path / "report.html").read_text()
        assert "nearest by latents" in page
        assert "root mean square over latents" in page


@pytest.mark.slow
def test_a_stream_killed_and_resumed(
    written: Path, data: Path, pipeline: Path, tmp_path: Path, launcher: Launcher
) -> None:
    """Shards of captioned images, encoded during training, and a negative prompt, without which the losses differ."""
    prepared = CliRunner().invoke(app, ["data", "prepare", str(data), str(tmp_path / "shards"), "--workers", "0"])
    assert prepared.exit_code == 0, prepared.output
    words = ('order=["consistency"]', "consistency.steps=4")
    recipe = recipe_of(written, Path(f"stream:{tmp_path / 'shards'}"), pipeline, *words)
    options = RunOptions(init=str(pipeline))
    train(recipe, tmp_path / "undisturbed", options)
    path, run = tmp_path / "same.toml", tmp_path / "run"
    path.write_text(to_toml(recipe))
    command = launcher.start("train", str(path), "--init", str(pipeline), "--run", str(run))
    killed_after(command, run, STAGES["consistency"])
    train(resolve(str(run / "recipe.toml")), run)
    assert fingerprint(run) == fingerprint(tmp_path / "undisturbed")
    without = recipe.model_copy(update={"condition": replace(recipe.condition, negative="")})
    train(without, tmp_path / "without", options)
    assert all_losses(tmp_path / "without", "consistency") != all_losses(run, "consistency")


def test_a_start_that_is_not_there_is_named_before_the_data(
    tmp_path: Path, pipeline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's own data is a stream that nobody has; without the hub, only its cache is asked."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for words, said in (
        (["--init", "someone/gone"], "--init: someone/gone is neither a folder nor a model on the hub"),
        (["--init", "./nowhere"], "--init: ./nowhere is not a folder; give a model folder"),
        ([], "consistency.init needs the model that the run starts from; give it with --init MODEL"),
        (["--init", str(pipeline)], "there is no file or folder coyo-512; give the path or the URLs of the shards"),
    ):
        ended = CliRunner().invoke(app, ["train", "sd15-coyo", *words])
        assert str(ended.exception).startswith(said)
        assert isinstance(ended.exception, TcmError)


def test_tangents(written: Path, data: Path, pipeline: Path, tmp_path: Path) -> None:
    """Guided distillation by the derivative: at a fine ratio the loss of the first step is that of a difference.

    In bf16 it is nearly the same, but not quite.
    """
    recipe, found = recipe_of(written, data, pipeline), {}
    for name, target, precision in (
        ("difference", "difference", "fp32"),
        ("tangent", "tangent", "fp32"),
        ("half", "tangent", "bf16"),
    ):
        changes = {
            "target": target,
            "curriculum": Curriculum(d=0, limit=0.9998),
            "steps": 1,
            "precision": precision,
        }
        stage = recipe.stages["consistency"].model_copy(update=changes)
        alone = recipe.model_copy(update={"stages": {"consistency": stage}})
        train(alone, tmp_path / name, RunOptions(init=str(pipeline)))
        (found[name],) = all_losses(tmp_path / name, "consistency")
    assert found["tangent"] == pytest.approx(found["difference"], rel=0.04)
    assert found["half"] == pytest.approx(found["tangent"], rel=0.04)
    assert found["half"] != found["tangent"]


def test_half_precision_keeps_fp32_weights_and_moments(
    written: Path, data: Path, pipeline: Path, tmp_path: Path
) -> None:
    """A step in bf16: another loss than in fp32, near it, and no tensor of the state in less than fp32."""
    found = {}
    for precision in ("fp32", "bf16"):
        recipe = recipe_of(written, data, pipeline)
        stage = recipe.stages["diffusion"].model_copy(update={"precision": precision, "steps": 1})
        alone = recipe.model_copy(update={"stages": {"diffusion": stage}})
        train(alone, tmp_path / precision, RunOptions(init=str(pipeline)))
        (found[precision],) = all_losses(tmp_path / precision, "diffusion")
    assert found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], rel=0.1)
    files = (tmp_path / "bf16" / STAGES["diffusion"] / "state" / "step-1").glob("*.safetensors")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for kind in ("exp_avg", "exp_avg_sq", "conv_in.weight"):
        assert any(name.endswith(kind) for name in tensors), kind
    assert {str(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()} == {"torch.float32"}


def test_lora(written: Path, data: Path, pipeline: Path, tmp_path: Path, launcher: Launcher) -> None:
    """Only the low-rank changes move; a run of a LoRA resumes, and exports one that diffusers loads."""
    words = ('order=["consistency", "truncated"]', 'network.lora={ rank = 2, targets = ["to_q", "to_v"] }')
    recipe = recipe_of(written, data, pipeline, *words)
    train(recipe, tmp_path / "run", RunOptions(init=str(pipeline)))
    start = tcm.load(pipeline).denoiser.network.unet.state_dict()
    model = tcm.load(tmp_path / "run")
    network = model.denoiser.network
    for name, tensor in network.unet.state_dict().items():
        if "lora_" not in name:
            assert torch.equal(tensor, start[name.replace(".base_layer", "")]), name
    merged = network.merged()
    assert merged.keys() == start.keys()
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, start[name])}
    assert changed
    assert all(name.endswith(("to_q.weight", "to_v.weight")) for name in changed)

    path, again = tmp_path / "same.toml", tmp_path / "again"
    path.write_text(to_toml(recipe))
    command = launcher.start("train", str(path), "--init", str(pipeline), "--run", str(again))
    killed_after(command, again, STAGES["truncated"])
    train(resolve(str(again / "recipe.toml")), again)
    assert fingerprint(again) == fingerprint(tmp_path / "run")

    ended = CliRunner().invoke(app, ["export", str(again), "--to", "diffusers", "--out", str(tmp_path / "exported")])
    assert ended.exit_code == 0, ended.output
    tuned = StableDiffusionPipeline.from_pretrained(pipeline)
    tuned.load_lora_weights(tmp_path / "exported" / LORA_FOLDER)
    tuned.scheduler = LCMScheduler.from_pretrained(tmp_path / "exported" / "scheduler")
    noise = SampleStreams([0]).normal((4, 8, 8))
    made = tuned("red cat", num_inference_steps=1, guidance_scale=1.0, latents=noise, output_type="pt").images
    torch.testing.assert_close(2 * made - 1, model.sample(1, prompts="red cat"), atol=1e-4, rtol=1e-4)


DOCS = (Path(__file__).parents[2] / "docs" / "stable-diffusion.md").read_text("utf-8")
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", DOCS, flags=re.S)


def test_docs(pipeline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's commands and code, as they are but for sizes; the hub's pipeline is the tiny one."""
    cached = tmp_path / "hub" / "models--stable-diffusion-v1-5--stable-diffusion-v1-5"
    shutil.copytree(pipeline, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "coyo").mkdir()
    lines = []
    for number in range(4):
        pixels = np.random.default_rng(number).integers(0, 256, (70, 80, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "coyo" / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": "a red cat"}))
    (tmp_path / "coyo" / "metadata.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    for command in [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]:
        words = shlex.split(command.replace("--size 512", "--size 64 --workers 0"))[1:]
        if words[0] == "train":
            words += [word for word in SMALL if "diffusion" not in word and "init=init" not in word] + [
                "--device",
                "cpu",
            ]
            words = [word for word in words if word != "*.accumulation=512"]
        ended = CliRunner().invoke(app, words)
        assert ended.exit_code == 0, f"{command}\n{ended.output}\n{ended.exception!r}"
    for code in [text for kind, text in BLOCKS if kind == "python"]:
        found: dict[str, object] = {}
        exec(code, found)
        assert found["image"].size == (64, 64)
    assert (tmp_path / "dogs.png").exists()

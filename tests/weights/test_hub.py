"""A model for the hub: the folder that is uploaded, its card, and the upload."""

import html
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_hub import fake_hub
from huggingface_hub import ModelCard
from PIL import Image
from small_models import DDPMPP, small_model
from text_network import TextConfig, Texts
from typer.testing import CliRunner

import tcm
from tcm.cli import app
from tcm.data.grid import image_grid
from tcm.data.pixels import to_uint8
from tcm.evaluation.features import weights_hash
from tcm.evaluation.scores import Score, append_scores
from tcm.foundation.errors import TcmError
from tcm.weights.card import Provenance
from tcm.weights.hub import HubFolder

SCORE = Score(
    *("fid", "FID", None, 2.4612, None, 50_000, "name", "", None, "times 80", "drawn", 0, "inception", "a" * 64),
    *("antialiased", "uint8", "cifar10", "b" * 64, 50_000, "", None, "", "2026-01-01"),
)


@pytest.fixture(autouse=True)
def _no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may reach the hub or use a token of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def push(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["push", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_an_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tcm.load("digits")
    (tmp_path / "received").mkdir()
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with fake_hub(tmp_path / "received") as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        assert model.push_to_hub("someone/name", private=True) == f"{hub.address}/someone/name"
        assert hub.tokens == {"Bearer hf_mine"}
        assert [(made["organization"], made["name"], made["visibility"]) for made in hub.created] == [
            ("someone", "name", "private")
        ]
    files = {file.name for file in (tmp_path / "received").iterdir()}
    assert files == {"config.json", "model.safetensors", "README.md", "samples.png"}
    received = tcm.Model.from_pretrained(tmp_path / "received")
    assert received.card == model.card
    assert torch.equal(received.sample(2), model.sample(2))
    picture = image_grid(to_uint8(model.sample(16, condition=tcm.Classes(10).spread(16))), columns=8, scale=8)
    assert np.array_equal(np.asarray(Image.open(tmp_path / "received" / "samples.png")), np.asarray(picture))


def test_the_card_of_a_run(tmp_path: Path) -> None:
    classes = tcm.Classes(3, ("ant", "bee", "cat"))
    came = Provenance(recipe="mine", stage="truncated", step=7, data="c" * 64)
    model = small_model(DDPMPP, classes, provenance=came)
    model.save(tmp_path / "run" / "2-truncated" / "model")
    recipe = '[data]\npath = "/home/ann/photos/insects"\n[network]\nkind = "ddpmpp"\n'
    (tmp_path / "run" / "recipe.toml").write_text(recipe)
    own = replace(SCORE, subject_hash=weights_hash(model.denoiser.state_dict()))
    two = replace(own, value=2.0549, sampling="times 80, 1", deviation=0.01)
    append_scores(tmp_path / "run" / "scores.jsonl", [own, two, replace(SCORE, value=99.0, subject_hash="d" * 64)])

    said = push("run", "someone/insects", "--dry-run", "--out", "out", "--licence", "cc-by-4.0")
    assert said.endswith("out: what would be uploaded to someone/insects\n")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    data = card.data.to_dict()
    assert data["license"] == "cc-by-4.0"
    assert data["library_name"] == "truncated-consistency"
    assert data["pipeline_tag"] == "unconditional-image-generation"
    results = card.data.eval_results
    assert [(one.metric_type, one.metric_value, one.dataset_name) for one in results] == [
        ("fid", 2.4612, "cifar10"),
        ("fid", 2.0549, "cifar10"),
    ]
    assert results[0].metric_args["images"] == 50_000
    for line in (
        "| FID | 2.461 | times 80 | 50,000 | cifar10 (50,000 images) | inception |",
        "| FID | 2.055 ± 0.01 | times 80, 1 | 50,000 | cifar10 (50,000 images) | inception |",
        "| conditions | ant, bee, cat |",
        "- stage: truncated",
        f"- training data (SHA-256): {'c' * 64}",
        'path = "insects"',
        'model = tcm.load("someone/insects")',
        'pipeline = DiffusionPipeline.from_pretrained("insects-diffusers", trust_remote_code=True)',
        "tcm export someone/insects --to onnx --out insects-onnx",
        "![16 images](samples.png)",
    ):
        assert line in card.text.splitlines()
    assert "ann" not in card.text.replace("channels", "")
    assert tcm.load("out").card.provenance == came.model_copy(update={"licence": "cc-by-4.0"})
    with pytest.raises(TcmError, match="--out=out exists; name a new folder"):
        push("run", "someone/insects", "--dry-run", "--out", "out")


def test_a_card_that_has_less_to_say(tmp_path: Path) -> None:
    """A published model under a licence of its publisher, whose images are no pictures, and no run."""
    licence = "NVIDIA Source Code License: non-commercial use only"
    model = small_model(TextConfig(), Texts(3), channels=4, provenance=Provenance(licence=licence))
    HubFolder(model, "someone/latents").write(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.license_name) == ("other", licence)
    assert "![" not in card.text
    assert "diffusers" not in card.text
    assert "## Scores\n\nNot measured." in card.text
    with pytest.raises(TcmError, match=r"the model's card already says 'NVIDIA .*'; leave --licence out"):
        HubFolder(model, "someone/latents", licence="mit").write(tmp_path / "other")


def test_names_are_text_in_a_card(tmp_path: Path) -> None:
    """Whatever a class, a recipe or a licence is called: no cell, line, link or element of its own."""
    hostile = "a|b\n## Use\n<script>alert(1)</script> [x](javascript:y) `z"
    came = Provenance(recipe=hostile, licence=hostile)
    model = small_model(DDPMPP, tcm.Classes(2, (hostile, "bee")), provenance=came)
    recipe = 'prompts = ["""\n```\n# not a heading\n"""]'
    HubFolder(model, "someone/name", recipe=recipe).write(tmp_path / "out")
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "<script>" not in card.text
    assert "[x](" not in card.text
    assert card.text.count("\n## Use\n") == 1
    assert card.data.license_name == hostile
    (row,) = (line for line in card.text.splitlines() if line.startswith("| conditions"))
    assert row.count("|") == 3
    assert html.unescape(row) == f"| conditions | {' '.join(hostile.split())}, bee |"
    assert f"````toml\n{recipe}\n````" in card.text


def test_the_usual_names_of_the_hub(tmp_path: Path) -> None:
    model = small_model(DDPMPP)
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(tcm.Model.from_pretrained(str(tmp_path / "model")).sample(2), model.sample(2))


def test_what_a_user_can_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TcmError, match="no token for the hub; run `hf auth login`, or set HF_TOKEN"):
        push("digits", "someone/name")
    with pytest.raises(TcmError, match="--out=here is only for --dry-run"):
        push("digits", "someone/name", "--out", "here")
    for name in ("digits", "a/b/c", "some one/name"):
        with pytest.raises(TcmError, match=r"use (one|a name) like someone/"):
            push("digits", name, "--dry-run")
    with pytest.raises(TcmError, match=r"none\.jsonl does not exist"):
        push("digits", "someone/name", "--dry-run", "--scores", "none.jsonl")
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with pytest.raises(TcmError, match=r"someone/name could not be uploaded \(.*\); check the name, the token"):
        push("digits", "someone/name")  # nobody listens
    with fake_hub(tmp_path, status=403) as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.address)
        with pytest.raises(TcmError, match=r"could not be uploaded .*403"):
            push("digits", "someone/name")

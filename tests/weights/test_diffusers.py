"""diffusers, unmodified, makes the images that torch makes: with our package, and without it."""

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import ConsistencyModelPipeline, DiffusionPipeline
from jump_network import JumpConfig
from small_models import DDPMPP, EDM2, small_model
from text_network import TextConfig, Texts
from torch import Tensor
from typer.testing import CliRunner

import tcm
from tcm.cli import app
from tcm.foundation.errors import TcmError
from tcm.method.preconditioning import Shifted
from tcm.weights import diffusers_export
from tcm.weights.diffusers_export import diffusers_pipeline, export_diffusers, network_source

pytestmark = pytest.mark.long

COUNT = 4
ELSEWHERE = """
import re, sys
for package in ("tcm", "pydantic"):
    sys.modules[package] = None  # importing it fails
import numpy as np, torch
from diffusers import DiffusionPipeline

exec(re.search(r"```python\\n(.*?)```", open("digits-diffusers/README.md").read(), re.S)[1])
assert image.size == (8, 8)
found = {}
for folder in sys.argv[1:]:
    pipeline = DiffusionPipeline.from_pretrained(folder, trust_remote_code=True)
    for steps in (1, 2):
        labels = [0, 1, 2, 3] if pipeline.unet.config.num_class_embeds else None
        made = pipeline(batch_size=4, class_labels=labels, num_inference_steps=steps,
                        generator=torch.Generator().manual_seed(5), output_type="pt")
        found[f"{folder} {steps}"] = made.images.numpy()
np.savez("found.npz", **found)
"""


def sampled(model: tcm.Model, steps: int) -> Tensor:
    """x ← f(x + t ε, t) with the noise that diffusers draws, as it shows images: in [0, 1]."""
    generator = torch.Generator().manual_seed(5)
    x = torch.zeros(COUNT, *model.card.image_shape)
    labels = tcm.Labels(torch.arange(COUNT)) if model.card.condition else None
    times: Sequence[float] = [80.0, model.card.sampler.second_time][:steps]
    with torch.no_grad():
        for t in times:
            x = model.denoiser(x + t * torch.randn(x.shape, generator=generator), torch.full((COUNT,), t), labels)
    return (x / 2 + 0.5).clamp(0, 1)


def piped(pipeline: DiffusionPipeline, steps: int, labels: list[int] | None) -> Tensor:
    assert type(pipeline) is ConsistencyModelPipeline
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(5)
    return pipeline(
        batch_size=COUNT, class_labels=labels, num_inference_steps=steps, generator=generator, output_type="pt"
    ).images


@pytest.fixture(scope="module")
def edm2() -> tcm.Model:
    return small_model(EDM2, tcm.Classes(5), sampler=tcm.ConsistencySampler(second_time=1.526), uncertainty=8)


@pytest.fixture(scope="module")
def ddpmpp() -> tcm.Model:
    return small_model(DDPMPP)


def test_a_folder_without_our_package(tmp_path: Path, edm2: tcm.Model, ddpmpp: tcm.Model) -> None:
    models = {"digits-diffusers": tcm.load("digits"), "edm2": edm2, "ddpmpp": ddpmpp}
    for name, model in models.items():
        assert export_diffusers(model, tmp_path / name) < 1e-5
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *models], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = np.load(tmp_path / "found.npz")
    for name, model in models.items():
        for steps in (1, 2):
            expected = sampled(model, steps).numpy()
            assert expected.std() > 0.01
            np.testing.assert_allclose(found[f"{name} {steps}"], expected, atol=1e-5)


def test_the_source_needs_torch_and_diffusers_alone(edm2: tcm.Model, ddpmpp: tcm.Model) -> None:
    for model in (edm2, ddpmpp):
        found = ast.walk(ast.parse(network_source(model)))
        modules = [part.module for part in found if isinstance(part, ast.ImportFrom)]
        roots = {module.partition(".")[0] for module in modules if module}
        assert roots - sys.stdlib_module_names == {"torch", "diffusers"}


def test_the_adapter_of_our_package(tmp_path: Path, edm2: tcm.Model) -> None:
    """Without `trust_remote_code`; diffusers saves the pipeline and loads it again."""
    pipeline = diffusers_pipeline(edm2)
    pipeline.save_pretrained(tmp_path / "saved")
    for again in (pipeline, DiffusionPipeline.from_pretrained(tmp_path / "saved")):
        for steps in (1, 2):
            torch.testing.assert_close(piped(again, steps, [0, 1, 2, 3]), sampled(edm2, steps), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match=r"num_inference_steps must be 1 or 2: .* below t=1, where"):
        piped(pipeline, 3, [0, 1, 2, 3])
    for wrong in (-5, -1, 5):
        with pytest.raises(ValueError, match=rf"class_labels=.*{wrong}\] must lie between 0 and 4"):
            piped(pipeline, 1, [0, 1, 2, wrong])


def test_the_command(tmp_path: Path, ddpmpp: tcm.Model) -> None:
    ddpmpp.save(tmp_path / "model")
    command = ["export", str(tmp_path / "model"), "--to", "diffusers"]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert "model-diffusers: largest difference from torch" in result.output
    assert (tmp_path / "model-diffusers" / "unet" / "ddpmpp_unet.py").is_file()
    assert "exists; name a new folder" in str(CliRunner().invoke(app, command).exception)
    half = CliRunner().invoke(app, [*command, "--half"])
    assert str(half.exception) == "--half is only for --to onnx; --to diffusers stays in fp32, so leave --half out"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda: small_model(DDPMPP, preconditioning=Shifted()), "preconditioning=Shifted.* cannot be exported"),
        (lambda: small_model(DDPMPP, image_shape=(3, 8, 16)), r"image_shape=\(3, 8, 16\) is not square"),
        (
            lambda: small_model(DDPMPP, kind="diffusion", sampler=tcm.HeunSampler()),
            "a diffusion model cannot be exported to diffusers.*; export the model of a later stage",
        ),
        (lambda: small_model(TextConfig(), Texts(3)), "a model of texts cannot be exported to diffusers"),
        (lambda: small_model(JumpConfig()), "cannot be built without its package"),
    ],
)
def test_what_diffusers_cannot_do(model: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(TcmError, match=said):
        export_diffusers(model(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_differs_is_refused(tmp_path: Path, ddpmpp: tcm.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusers_export, "BOUND", 0.0)
    with pytest.raises(TcmError, match=r"the pipeline differs from torch by .*, more than 0; nothing was written"):
        export_diffusers(ddpmpp, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_without_diffusers(ddpmpp: tcm.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(TcmError, match=r"diffusers pipelines need more packages; run `pip install -e '.\[t2i\]'`"):
        diffusers_pipeline(ddpmpp)

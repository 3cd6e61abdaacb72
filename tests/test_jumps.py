"""A network with a second time goes the whole way, though two callers know nothing of it: costs and dFID."""

import pytest
import torch
from inprocess import train
from jump_network import JumpConfig, JumpNetwork, JumpStage, Towards, jump
from launching import tiny_recipe

from tcm.data import open_dataset
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import evaluate_model, model_subject
from tcm.evaluation.features import load_detector
from tcm.evaluation.generation import Sampling
from tcm.evaluation.references import reference_of
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Classes
from tcm.recipes.estimates import estimate
from tcm.recipes.schema import Recipe
from tcm.report.drawing import path_from_noise
from tcm.weights import Model

CLASSES = Classes(10)


def recipe(conditional: bool = True) -> Recipe:
    base = tiny_recipe(2)
    given = {key: getattr(base, key) for key in base.model_fields_set}
    stage = JumpStage(steps=4, batch=8, optimizer="adam", learning_rate=1e-2, init="scratch", accumulation=2)
    given |= {"network": JumpConfig(), "stages": {"jumps": stage}, "conditional": conditional}
    return Recipe.model_validate(given | {"image_shape": (1, 8, 8), "classes": 10})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Trained from a recipe, with its sample grid, and loaded from its folder."""
    folder = tmp_path_factory.mktemp("jumps") / "run"
    train(recipe(), folder)
    assert (folder / "1-jumps" / "samples" / "step-0000004.png").is_file()
    return Model.load(folder / "1-jumps" / "model")


def test_s_matters(model: Model) -> None:
    x, t = torch.randn(2, 1, 8, 8), torch.full((2,), 5.0)
    labels = CLASSES.draw([0, 1])
    near, far = (model.denoiser(x, t, Towards(torch.full((2,), s), labels)) for s in (4.0, 0.0))
    assert not torch.allclose(near, far)
    torch.testing.assert_close(jump(model.denoiser, x, t, t, labels), x)


def test_the_sampler_jumps(model: Model) -> None:
    """T → 1 → 0: the second jump begins where the first has landed."""
    labels = CLASSES.draw([0, 1])
    first, second = model.sampler.run(model.denoiser, SampleStreams([0, 1]), labels, steps=2)
    assert (first.t, second.t) == (10.0, 1.0)
    torch.testing.assert_close(second.x_t, first.x)
    torch.testing.assert_close(model.sample(2, steps=2), second.x)
    assert path_from_noise(model, 2).times == [10.0, 1.0]


def test_denoising_without_s_is_a_jump_to_0(model: Model) -> None:
    x, t, labels = torch.randn(3, 1, 8, 8), torch.full((3,), 2.0), CLASSES.draw([0, 1, 2])
    with torch.no_grad():
        expected = jump(model.denoiser, x, t, torch.zeros(3), labels)
        torch.testing.assert_close(model_denoise(model)(x, t, labels), expected)


def test_it_is_measured(model: Model) -> None:
    dataset = open_dataset("digits")
    reference = reference_of(dataset, "digits", load_detector("digits"))
    scores = evaluate_model(model, "m", range(70), Sampling(steps=2), reference)
    subject = model_subject(model, "m", None, 0)
    scores += denoising_distances(model_denoise(model), dataset, [1.0], reference, subject, 70)
    assert all(torch.isfinite(torch.tensor(score.value)) for score in scores)


@pytest.mark.parametrize("conditional", [True, False])
def test_its_cost_is_counted(conditional: bool) -> None:
    made = recipe(conditional)
    network = JumpConfig().build((1, 8, 8), CLASSES)
    assert isinstance(network, JumpNetwork)
    cost = estimate(made, made.stages["jumps"])
    assert cost.parameters == sum(parameter.numel() for parameter in network.parameters())
    forward = 2 * 64 * 9 * 4 * 2 + 2 * 2 * 4  # two convolutions on 8 × 8 pixels, and the map of both times
    assert cost.step_flops == 3 * forward * 8

"""Stable Diffusion's UNet as our network: its size, its prediction, its times, recomputation, LoRA, tangents."""

import sys

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from tiny_pipeline import UNET
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tcm import Classes, Denoiser
from tcm.foundation.errors import TcmError
from tcm.method.conditions import TextEmbeddings
from tcm.method.preconditioning import column
from tcm.method.tangents import tangent
from tcm.networks import DiffusersUNetConfig
from tcm.networks.cost import network_cost
from tcm.networks.diffusers_unet import Lora, NoiseSchedule
from tcm.recipes.estimates import estimate
from tcm.recipes.resolve import resolve
from tcm.text.condition import Texts

SHAPE, TEXTS = (4, 8, 8), Texts("none", width=16, tokens=5)
TINY = DiffusersUNetConfig(**UNET)


def denoiser(config: DiffusersUNetConfig, seed: int = 0) -> Denoiser:
    torch.manual_seed(seed)
    return Denoiser(config.build(SHAPE, TEXTS), SHAPE, TEXTS, sigma_data=1.0, t_max=14.61)


def texts(count: int) -> TextEmbeddings:
    empty = TEXTS.dummy(count)
    tokens = torch.randn(count, 5, 16, generator=torch.Generator().manual_seed(7))
    return TextEmbeddings(tokens, empty.mask, empty.null_tokens, empty.null_mask)


def gradients(f: Denoiser) -> dict[str, Tensor]:
    f(torch.ones(2, *SHAPE), torch.tensor([0.5, 9.0]), texts(2)).square().mean().backward()
    return {name: parameter.grad for name, parameter in f.named_parameters() if parameter.grad is not None}


def test_size_of_version_1_5() -> None:
    """859.5 M parameters, 402 G multiplications and additions; recomputing its blocks saves most activations."""
    texts_of_clip = Texts("none", width=768, tokens=77)
    costs = [
        network_cost(DiffusersUNetConfig(gradient_checkpointing=on), (4, 64, 64), texts_of_clip) for on in (False, True)
    ]
    assert [cost.parameters for cost in costs] == [859_520_964] * 2
    assert costs[0].forward_flops == pytest.approx(2 * 401.6e9, rel=1e-3)
    assert costs[1].saved_per_image < costs[0].saved_per_image / 5
    assert [cost.recomputes for cost in costs] == [False, True]


def test_the_papers_run() -> None:
    """App. B's batch, steps and guidance; t' = 2 sigma_data as at 0.5; the memory and days that the page predicts."""
    recipe = resolve("sd15-coyo")
    stages = list(recipe.stages.values())
    assert [(stage.batch, stage.steps, stage.guidance) for stage in stages] == [(512, 80_000, 6.0), (512, 200_000, 6.0)]
    assert (stages[1].t_prime, recipe.second_time) == (2.0, pytest.approx(float(NoiseSchedule().sigmas()[563])))
    days = [estimate(recipe, stage).gpu_hours / 8 / 24 for stage in stages]
    assert days == pytest.approx([4.1, 10.2], abs=0.05)
    small = ["*.accumulation=512", "network.gradient_checkpointing=true"]
    for words, gigabytes in ((small, 20.8), ([*small, "network.lora={ rank = 64 }"], 7.3)):
        changed = resolve("sd15-coyo", words)
        assert estimate(changed, changed.stages["truncated"]).memory.total / 1e9 == pytest.approx(gigabytes, abs=0.1)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_denoiser_is_the_pipelines_prediction(prediction: str) -> None:
    f = denoiser(TINY.model_copy(update={"prediction": prediction}))
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        clip_sample=False,
    )
    scheduler.set_timesteps(1000)
    sigmas = NoiseSchedule().sigmas()
    for timestep in (0, 1, 354, 998, 999):
        sigma = sigmas[timestep : timestep + 1]
        x = float(sigma) * torch.randn(1, *SHAPE)
        scaled = x / float(1 + sigma**2) ** 0.5
        with torch.no_grad():
            output = f.network.unet(scaled, timestep, texts(1).tokens).sample
            theirs = scheduler.step(output, timestep, scaled).pred_original_sample
            ours = f(x, sigma, texts(1))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


@given(st.floats(0.001, 30.0))
def test_timestep_is_diffusers(sigma: float) -> None:
    """Also outside the range, where it stays at an end."""
    scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    levels = NoiseSchedule().sigmas().log()
    theirs = scheduler._sigma_to_t(np.array(sigma), levels.numpy())
    ours = float(TIMED.timestep(torch.tensor([sigma]).log())[0])
    assert ours == pytest.approx(float(theirs), abs=2e-3)


TIMED = TINY.build(SHAPE, TEXTS)


def test_recomputation_changes_nothing() -> None:
    kept, recomputed = (denoiser(TINY.model_copy(update={"gradient_checkpointing": on})) for on in (False, True))
    calls = []
    block = recomputed.network.unet.down_blocks[0].resnets[0]
    block.norm1.register_forward_hook(lambda *_: calls.append(1))
    expected, found = gradients(kept), gradients(recomputed)
    assert len(calls) == 2, "forward, and again in the backward pass"
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-7, rtol=1e-5)


def test_lora() -> None:
    """Starts as the UNet that it is given, trains only its own weights, and is merged into the UNet's."""
    base, tuned = denoiser(TINY), denoiser(TINY.model_copy(update={"lora": Lora(rank=2, alpha=4)}), seed=1)
    tuned.network.load_state_dict(tuned.network.starting_from(base.network.state_dict()))
    x, t = torch.randn(2, *SHAPE), torch.tensor([0.5, 9.0])
    with torch.no_grad():
        torch.testing.assert_close(tuned(x, t, texts(2)), base(x, t, texts(2)))
    tuned.learn()
    moving = {name for name, parameter in tuned.named_parameters() if parameter.requires_grad}
    assert moving == gradients(tuned).keys()
    assert all("lora_" in name for name in moving)
    assert len(moving) == 2 * 4 * 2 * 4, "down and up, of four layers, in two attentions of four transformers"
    with torch.no_grad():
        for parameter in tuned.network.learning():
            parameter.add_(0.1 * torch.randn_like(parameter))
        merged = denoiser(TINY)
        merged.network.unet.load_state_dict(tuned.network.merged())
        torch.testing.assert_close(merged(x, t, texts(2)), tuned(x, t, texts(2)), atol=1e-4, rtol=1e-5)
        assert not torch.allclose(merged(x, t, texts(2)), base(x, t, texts(2)), atol=1e-2)


def test_tangent() -> None:
    """Forward-mode derivatives in x and t, by torch's math kernel for attention, against differences in float64."""
    network = TINY.build(SHAPE, TEXTS).double().eval()
    network.log_sigmas = NoiseSchedule().sigmas().log()
    given = texts(2)
    condition = TextEmbeddings(given.tokens.double(), given.mask, given.null_tokens, given.null_mask)
    x, c = torch.randn(2, *SHAPE).double(), torch.tensor([-0.3, 0.41]).double()
    along = torch.randn_like(x), torch.ones_like(c)

    # The timestep's embedding is float32 inside diffusers: with a fixed time, differences are exact enough.
    def at(x: Tensor) -> Tensor:
        return network(x, c, condition, None)

    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        _, along_x = torch.func.jvp(at, (x,), along[:1])
        step = 1e-6
        differences = (at(x + step * along[0]) - at(x - step * along[0])) / (2 * step)
        _, whole = torch.func.jvp(lambda x, c: network(x, c, condition, None), (x, c), along)
    torch.testing.assert_close(along_x.detach(), differences, atol=1e-5, rtol=1e-5)
    assert bool(whole.isfinite().all())


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@pytest.mark.parametrize("lora", [None, Lora(rank=2)], ids=["all weights", "LoRA"])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_tangent_and_gradient_in_half_precision(half: torch.dtype, lora: Lora | None) -> None:
    """Nearly those of float32, also for a UNet that recomputes its activations."""
    f = denoiser(TINY.model_copy(update={"gradient_checkpointing": True, "lora": lora}))
    with torch.no_grad():
        for parameter in f.network.learning():
            parameter.add_(0.01 * torch.randn_like(parameter))  # a LoRA begins with zeros
    f.learn()
    by_weights = flat(gradients(f))
    f.zero_grad()
    t = torch.tensor([0.5, 9.0], dtype=torch.float64)
    x, eps = torch.randn(2, 2, *SHAPE)
    x_t = x + column(t, x) * eps
    exact = tangent(f, x_t, t, eps, texts(2)).flatten(1)
    f.network.arithmetic = half
    found = tangent(f, x_t, t, eps, texts(2)).flatten(1)
    assert float(torch.cosine_similarity(found, exact).min()) > 0.998
    assert not torch.allclose(found, exact, rtol=1e-5), "it was computed in half precision"
    in_half = flat(gradients(f))
    assert float(torch.cosine_similarity(in_half, by_weights, dim=0)) > 0.99
    assert not torch.allclose(in_half, by_weights, rtol=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: TINY.build(SHAPE, Classes(3)), "needs texts, but the condition is 3 classes"),
        (lambda: TINY.build((3, 64, 64), TEXTS), "the shape of the latents"),
        (lambda: TINY.build((4, 7, 8), TEXTS), "7 is not a multiple of 2"),
        (lambda: TINY.check_scales(0.5, 10.0), "needs sigma_data=1.0"),
        (lambda: TINY.check_scales(1.0, 80.0), "use t_max=14.6146"),
        (lambda: resolve("sd15-coyo", ["network.dropout=0.1"]), "set dropout=0.0"),
        (lambda: resolve("sd15-coyo", ["sigma_data=0.5"]), "needs sigma_data=1.0"),
        (lambda: denoiser(TINY)(torch.zeros(1, *SHAPE), torch.ones(1)), "give their embeddings as the condition"),
    ],
)
def test_refused(build, message: str) -> None:
    with pytest.raises(TcmError, match=message):
        build()


def test_without_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(TcmError, match=r"needs more packages.*\[t2i\]"):
        TINY.build(SHAPE, TEXTS)

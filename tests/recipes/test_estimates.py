"""Predicted FLOPs and memory against what a real step on the CPU does."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Classes, Condition, ConditionKind, Labels
from tcm.method.objectives import Batch
from tcm.method.preconditioning import Denoiser, Masks, Network
from tcm.networks import ImageShape, NetworkConfig
from tcm.networks.cost import network_cost
from tcm.recipes.estimates import PEAK_FLOPS, UTILISATION, estimate
from tcm.recipes.resolve import resolve

OVERRIDES = {
    "diffusion": ["digits", "diffusion"],
    "consistency from data": ["digits", "consistency", "consistency.teacher=none"],
    "Heun": ["digits", "consistency"],
    "Euler": ["digits", "consistency", "consistency.solver=euler"],
    "Heun with guidance": ["digits", "consistency", "consistency.guidance=2.0", "diffusion.label_dropout=0.1"],
    "truncated": ["digits", "truncated", "truncated.teacher=none"],
    "tangents from data": ["digits", "consistency", "consistency.teacher=none", "consistency.target=tangent"],
    "tangents, guided": [
        "digits",
        "consistency",
        "consistency.target=tangent",
        "consistency.guidance=2.0",
        "diffusion.label_dropout=0.1",
    ],
    "truncated by tangents": ["digits", "truncated", "truncated.target=tangent"],
    "truncated, EDM2": [
        "digits",
        "truncated",
        "network.kind=edm2",
        "network.channels=16",
        "network.channel_mult=[1, 2]",
        "network.dropout=0.2",
    ],
}


@pytest.mark.parametrize("case", OVERRIDES)
def test_a_real_step(case: str) -> None:
    name, stage_name, *overrides = OVERRIDES[case]
    recipe = resolve(name, [*overrides, f"{stage_name}.batch=8"])
    stage = recipe.stages[stage_name]
    cost = estimate(recipe, stage)
    shape, classes = recipe.image_shape, recipe.classes
    assert shape is not None
    assert classes is not None
    condition = Classes(classes)
    denoisers = [Denoiser(recipe.network.build(shape, condition), shape, condition) for _ in range(3)]
    batch = Batch.whole(torch.zeros(8, *shape), Labels(torch.zeros(8, dtype=torch.long)))

    parameters = {parameter.untyped_storage().data_ptr() for parameter in denoisers[0].parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            models = dict(zip(("student", *stage.roles(recipe)), denoisers, strict=False))
            losses = stage.build(recipe).loss(models, batch, 0, SampleStreams(range(8)))
        torch.autograd.backward(losses.total)
    # The first layer's input needs no gradient, so that the backward pass costs a little less than two forward ones.
    assert 0.98 * cost.step_flops < counter.get_total_flops() <= cost.step_flops
    saved = sum(storage.nbytes() for storage in storages.values())
    assert cost.memory.kept_once + cost.memory.activations == pytest.approx(saved, rel=0.01)


def test_known_sizes() -> None:
    """EDM2's paper gives 102 and 406 billion multiplications for S and XL; EDM's network has 21 billion."""
    forward = {
        name: estimate(r := resolve(name), r.stages["truncated"]).forward_flops
        for name in ("cifar10", "imagenet64-s", "imagenet64-xl")
    }
    assert forward["cifar10"] / 2e9 == pytest.approx(21.2, abs=0.1)
    assert forward["imagenet64-s"] / 2e9 == pytest.approx(102, rel=0.02)
    assert forward["imagenet64-xl"] / 2e9 == pytest.approx(406, rel=0.02)


def test_memory_and_hours() -> None:
    recipe = resolve("digits", ["truncated.averages=[{kind='constant'}, {kind='power'}]"])
    cost = estimate(recipe, recipe.stages["truncated"])
    weights = 4 * cost.parameters
    memory = cost.memory
    assert (memory.weights, memory.gradients, memory.optimizer) == (weights, weights, 2 * weights)
    assert (memory.averages, memory.helpers) == (2 * weights, 2 * weights)
    assert memory.state == 8 * weights
    assert memory.activations == recipe.stages["truncated"].batch * cost.activations_per_image
    assert memory.total == memory.state + memory.activations
    assert cost.gpu_hours == pytest.approx(450 * cost.step_flops / (PEAK_FLOPS["fp32"] * UTILISATION) / 3600)
    plain = estimate(recipe, recipe.stages["diffusion"]).memory
    assert (plain.helpers, plain.averages) == (0, weights)


def test_fp32_is_not_tf32() -> None:
    """An A100 makes 19.5 TFLOP/s in IEEE fp32, 156 with TF32 and 312 in 16 bits; tf32 keeps its numbers in 32 bits."""
    recipe = resolve("cifar10")
    stage = recipe.stages["truncated"]
    costs = {
        name: estimate(recipe, stage.model_copy(update={"precision": name}))
        for name in ("fp32", "tf32", "bf16", "fp16")
    }
    assert costs["fp32"].gpu_hours == pytest.approx(200_000 * costs["fp32"].step_flops / (0.3 * 19.5e12) / 3600)
    hours = [costs["fp32"].gpu_hours / cost.gpu_hours for cost in costs.values()]
    assert hours == pytest.approx([1, 8, 16, 16])
    memory = [costs["fp32"].memory.activations / cost.memory.activations for cost in costs.values()]
    assert memory == pytest.approx([1, 1, 2, 2])


def test_batch_shared_by_processes_and_micro_batches() -> None:
    recipe = resolve(
        "digits", ["truncated.accumulation=4", "truncated.precision=bf16", "truncated.frozen_precision=bf16"]
    )
    stage = recipe.stages["truncated"]
    one, two = estimate(recipe, stage), estimate(recipe, stage, processes=2)
    assert one.memory.activations == 32 * one.activations_per_image == 2 * two.memory.activations
    assert one.step_flops == two.step_flops
    whole = estimate(resolve("digits"), resolve("digits").stages["truncated"])
    assert whole.memory.activations == 8 * one.memory.activations
    # The teacher keeps its 32 bits, the frozen model halves them.
    weights = 4 * one.parameters
    assert (whole.memory.helpers, one.memory.helpers) == (2 * weights, weights + weights // 2)


@pytest.mark.parametrize("key", ["image_shape", "classes"])
def test_what_the_data_would_say_must_be_stated(key: str) -> None:
    recipe = resolve("digits", [f"{key}=none"])
    with pytest.raises(TcmError, match=f"digits: {key} is not set, so costs cannot be computed"):
        estimate(recipe, recipe.stages["diffusion"])


class AttentiveConfig(NetworkConfig):
    """Attention over pixels, two heads of queries for each of keys, called as `options` say."""

    kind: str = "test_estimates:AttentiveConfig"
    options: str = ""

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "Attentive":
        return Attentive(self.options)


class Attentive(Network):
    """One learned scale."""

    def __init__(self, options: str) -> None:
        super().__init__()
        self.options, self.scale = options, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        q = k = v = (self.scale * x).flatten(2).transpose(1, 2)[:, None].expand(-1, 2, -1, -1)
        match self.options:
            case "positional":
                out = F.scaled_dot_product_attention(q, k, v, None, 0.0, True)
            case "named":
                out = F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True, scale=0.5)
            case "masked":
                mask = torch.zeros(q.shape[-2], q.shape[-2])
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            case _:
                out = F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)
        return out[:, 0].transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("options", ["positional", "named", "masked", "grouped"])
def test_attention_with_any_options_is_counted(options: str) -> None:
    """Fused attention keeps no weights: less than one number for each pair of the 64 pixels of an image."""
    cost = network_cost(AttentiveConfig(options=options), (3, 8, 8), None)
    assert 0 < cost.saved_per_image < 4 * 64 * 64

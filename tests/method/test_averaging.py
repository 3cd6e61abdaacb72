"""Averages against a plain recursion in numpy."""

import numpy as np
import pytest
import torch
from torch import nn

from tcm import Average, ConstantDecay, DDPMppConfig, PowerDecay


def test_power_betas_are_the_references(numbers) -> None:
    for given in numbers["power_ema_beta"]:
        assert PowerDecay(given["gamma"]).beta(given["iteration"]) == pytest.approx(given["beta"], rel=1e-9)


def noisy_steps(module: nn.Module, count: int):
    for iteration in range(1, count + 1):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(torch.randn_like(parameter))
        module(torch.randn(4, 3))  # moves the buffers of the batch normalisation
        yield iteration


def test_averages_follow_the_recursion_several_at_once() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    decays = [ConstantDecay(0.9), ConstantDecay(0.0), PowerDecay(6.94), PowerDecay(16.97)]
    averages = [Average(module, decay) for decay in decays]
    plain = [{name: p.detach().double().numpy() for name, p in module.named_parameters()} for _ in decays]
    for iteration in noisy_steps(module, 20):
        for average, decay, mean in zip(averages, decays, plain, strict=True):
            average.update(module, iteration)
            beta = decay.decay if isinstance(decay, ConstantDecay) else (1 - 1 / iteration) ** (decay.gamma + 1)
            for name, parameter in module.named_parameters():
                mean[name] = beta * mean[name] + (1 - beta) * parameter.detach().double().numpy()
    for average, mean in zip(averages, plain, strict=True):
        state = average.state_dict()
        for name, value in mean.items():
            np.testing.assert_allclose(state[name].numpy(), value, rtol=1e-4, atol=1e-5)
        for name, buffer in module.named_buffers():
            assert torch.equal(state[name], buffer), name
        assert state["1.num_batches_tracked"].dtype == torch.int64


def test_power_average_forgets_where_it_began() -> None:
    module = nn.Linear(2, 2)
    average = Average(module, PowerDecay())
    nn.init.constant_(module.weight, 5.0)
    average.update(module, 1)
    assert average.state_dict()["weight"].unique().tolist() == [5]


def test_an_average_is_loaded_by_its_network_and_kept_apart_from_it() -> None:
    network = DDPMppConfig(channels=8, channel_mult=(1,), blocks=1).build((1, 4, 4), None)
    average = Average(network, ConstantDecay(0.5))
    start = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        network.conv_in.weight.add_(1)
    assert torch.equal(average.state_dict()["conv_in.weight"], start["conv_in.weight"])
    average.update(network, 1)
    other = DDPMppConfig(channels=8, channel_mult=(1,), blocks=1).build((1, 4, 4), None)
    other.load_state_dict(average.state_dict())
    torch.testing.assert_close(other.conv_in.weight.detach(), start["conv_in.weight"] + 0.5)


def test_going_on_from_a_saved_average() -> None:
    module = nn.Linear(2, 2)
    first, second = Average(module, PowerDecay()), None
    for iteration in range(1, 9):
        nn.init.normal_(module.weight)
        first.update(module, iteration)
        if second is not None:
            second.update(module, iteration)
        if iteration == 4:
            saved = {name: value.clone() for name, value in first.state_dict().items()}
            second = Average(nn.Linear(2, 2), PowerDecay())
            second.load_state_dict(saved)
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())

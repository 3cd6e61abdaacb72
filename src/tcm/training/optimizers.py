"""Optimisers and learning rates."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer, RAdam

from tcm.recipes.stages import Optimization


def build_optimizer(given: Optimization, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The optimiser with its state allocated, so that a checkpoint can be read into it before step 0."""
    parameters = list(parameters)
    settings = (given.learning_rate, given.betas)
    match given.optimizer:
        case "radam":
            optimizer: Optimizer = RAdam(
                parameters, *settings, weight_decay=given.weight_decay, decoupled_weight_decay=True, foreach=True
            )
        case "adam":
            optimizer = Adam(parameters, *settings, weight_decay=given.weight_decay, fused=True)
        case "adamw":
            optimizer = AdamW(parameters, *settings, weight_decay=given.weight_decay, fused=True)
    for parameter in parameters:
        # Where the fused optimisers count their steps on the parameter's device, RAdam counts on the CPU.
        device = "cpu" if given.optimizer == "radam" else parameter.device
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer

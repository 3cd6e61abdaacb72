"""Optimisers and learning rates."""

from collections.abc import Iterable
from math import sqrt

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer, RAdam

from tcm.recipes.stages import Stage


def build_optimizer(stage: Stage, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """The stage's optimiser with its state allocated, so that a checkpoint can be read into it before step 0."""
    parameters = list(parameters)
    settings = (stage.learning_rate, stage.betas)
    match stage.optimizer:
        case "radam":
            optimizer: Optimizer = RAdam(
                parameters, *settings, weight_decay=stage.weight_decay, decoupled_weight_decay=True, foreach=True
            )
        case "adam":
            optimizer = Adam(parameters, *settings, weight_decay=stage.weight_decay, fused=True)
        case "adamw":
            optimizer = AdamW(parameters, *settings, weight_decay=stage.weight_decay, fused=True)
    for parameter in parameters:
        # Where the fused optimisers count their steps on the parameter's device, RAdam counts on the CPU.
        device = "cpu" if stage.optimizer == "radam" else parameter.device
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def learning_rate(stage: Stage, step: int, offset: int = 0) -> float:
    """α_ref/√max(i/i_ref, 1) for the inverse-square-root schedule, after a linear warm-up. TCM App. F.

    The stage's steps count from 0; the schedule counts `offset` steps before them.
    """
    rate = stage.learning_rate
    if stage.schedule == "inverse_sqrt" and stage.schedule_reference is not None:
        rate /= sqrt(max((offset + step) / stage.schedule_reference, 1))
    if step < stage.warmup:
        rate *= (step + 1) / stage.warmup
    return rate

"""Weights that processes share (FSDP2)."""

from torch import nn
from torch.distributed.fsdp import fully_shard

from tcm.method.preconditioning import Denoiser


def shard(denoiser: Denoiser) -> None:
    """Share the weights, gradients and optimiser state of a denoiser among the processes, block by block (FSDP2)."""

    _widen_scalars(denoiser)
    for block in denoiser.network.blocks():
        fully_shard(block)
    if denoiser.uncertainty is not None:
        fully_shard(denoiser.uncertainty)  # the loss calls it by itself
    # The root too gives its weights back after each pass: averages are exchanged between passes.
    fully_shard(denoiser, reshard_after_forward=True)
    denoiser.weights_are_shared = True


def _widen_scalars(denoiser: Denoiser) -> None:
    """Make vectors of one element of scalar parameters, which FSDP2 cannot share; they compute the same."""
    for module in denoiser.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim == 0:
                setattr(module, name, nn.Parameter(parameter.detach().view(1), parameter.requires_grad))

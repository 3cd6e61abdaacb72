"""Networks of any structure can be shared by processes."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tcm.method.conditions import Condition
from tcm.method.preconditioning import Denoiser, Masks, Network
from tcm.training.sharding import shard


class Block(nn.Module):
    """A block that holds blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(1, 1, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Nested(Network):
    """Lists of lists of blocks, as in a U-Net's levels."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.ModuleList(Block() for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        for level in self.levels:
            for block in level:
                x = block(x)
        return x


@pytest.fixture
def _one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_blocks_come_from_the_inside_out() -> None:
    blocks = Nested().blocks()
    assert len(set(blocks)) == len(blocks) == 8 + 4
    for index, block in enumerate(blocks):
        assert set(block.children()).isdisjoint(blocks[index:])
        assert isinstance(block, nn.Conv2d) or set(block.layers) <= set(blocks[:index])


@pytest.mark.usefixtures("_one_process")
def test_nested_lists_are_shared_and_compute_the_same() -> None:
    denoiser = Denoiser(Nested(), (1, 8, 8))
    x, t = torch.randn(2, 1, 8, 8), torch.ones(2)
    expected = denoiser(x, t).detach()
    assert not denoiser.weights_are_shared
    shard(denoiser)
    assert denoiser.weights_are_shared, "so that no process leaves out a call"
    assert sum(isinstance(module, FSDPModule) for module in denoiser.modules()) == 8 + 4 + 1
    output = denoiser(x, t)
    torch.testing.assert_close(output.detach(), expected)
    torch.autograd.backward(output.sum())
    assert all(parameter.grad is not None for parameter in denoiser.parameters())

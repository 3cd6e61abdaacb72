"""`compile = true`: the losses of the plain network, to tolerance."""

import shutil
from pathlib import Path

import pytest
import torch
from inprocess import train
from launching import losses, tiny_recipe

import tcm
from tcm.method.tangents import tangent

WORDS = ('order=["diffusion"]', "network.channel_mult=[1]", "diffusion.log_every=1", "diffusion.sample_every=0")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_compiled_losses(tmp_path: Path) -> None:
    train(tiny_recipe(3, *WORDS), tmp_path / "eager")
    train(tiny_recipe(3, *WORDS, "diffusion.compile=true"), tmp_path / "compiled")
    eager, compiled = (losses(tmp_path / name / "0-diffusion") for name in ("eager", "compiled"))
    assert compiled == pytest.approx(eager, rel=1e-3)
    assert len(eager) == 3


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_tangents_are_not_lost_in_a_compiled_network() -> None:
    f = tcm.Denoiser(tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1).build((1, 8, 8), None), (1, 8, 8))
    x, t = torch.randn(2, 1, 8, 8), torch.ones(2, dtype=torch.float64)
    known = tangent(f, x, t, x)
    f.network.compile()
    f(x, t).sum().backward()
    torch.testing.assert_close(tangent(f, x, t, x), known)

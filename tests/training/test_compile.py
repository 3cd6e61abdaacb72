"""`compile = true`: the losses of the plain network, to tolerance."""

import os
import shutil
from pathlib import Path

import pytest
from inprocess import train
from launching import losses, tiny_recipe

WORDS = ('order=["diffusion"]', "network.channel_mult=[1]", "diffusion.log_every=1", "diffusion.sample_every=0")


@pytest.mark.skipif(not os.environ.get("TCM_SLOW"), reason="a minute of compiling; TCM_SLOW=1 runs it")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="torch.compile needs a compiler")
def test_compiled_losses(tmp_path: Path) -> None:
    train(tiny_recipe(3, *WORDS), tmp_path / "eager")
    train(tiny_recipe(3, *WORDS, "diffusion.compile=true"), tmp_path / "compiled")
    eager, compiled = (losses(tmp_path / name / "0-diffusion") for name in ("eager", "compiled"))
    assert compiled == pytest.approx(eager, rel=1e-3)
    assert len(eager) == 3

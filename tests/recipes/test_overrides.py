"""Overrides for all stages, and warm-ups that follow a shortened stage."""

import subprocess
import sys
import warnings

import pytest

from tcm.foundation.errors import TcmError, TcmWarning
from tcm.recipes.resolve import resolve


def test_all_stages() -> None:
    stages = resolve("cifar10", ["*.batch=16", "*.steps=500"]).stages
    assert {name: (stage.batch, stage.steps) for name, stage in stages.items()} == {
        "consistency": (16, 500),
        "truncated": (16, 500),
    }


@pytest.mark.parametrize("order", [1, -1])
def test_what_is_given_for_one_stage_comes_first(order: int) -> None:
    stages = resolve("cifar10", ["*.batch=16", "truncated.batch=32"][::order]).stages
    assert [stage.batch for stage in stages.values()] == [16, 32]


def test_only_stages_that_have_the_key() -> None:
    recipe = resolve("digits", ["*.t_prime=0.5", "*.curriculum.limit=0.95"])
    assert recipe == resolve(
        "digits", ["truncated.t_prime=0.5", "consistency.curriculum.limit=0.95", "truncated.curriculum.limit=0.95"]
    )


def test_a_key_that_no_stage_has() -> None:
    with pytest.raises(TcmError, match=r"override '\*.stepz=5': no stage has the key 'stepz'; did you mean '\*.steps'"):
        resolve("digits", ["*.stepz=5"])
    with pytest.raises(TcmError, match=r"override '\*.seed=5': no stage has the key 'seed'"):
        resolve("digits", ["*.seed=5"])
    with pytest.raises(TcmError, match="is not of the form key=value"):
        resolve("digits", ["*.steps"])


def test_a_warmup_that_is_too_long_is_shortened() -> None:
    with pytest.warns(TcmWarning, match=r"^diffusion.warmup=50 is too long for steps=50; it is now 5$"):
        recipe = resolve("digits", ["diffusion.steps=50"])
    assert recipe.stages["diffusion"].warmup == 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert resolve("digits", ["diffusion.steps=51"]).stages["diffusion"].warmup == 50
        assert resolve("digits", ["diffusion.steps=20", "diffusion.warmup=3"]).stages["diffusion"].warmup == 3
        with pytest.raises(TcmError, match=r"diffusion.warmup=30 must be less than steps=20; shorten it"):
            resolve("digits", ["*.steps=20", "diffusion.warmup=30"])


def test_the_command_says_so_in_one_line() -> None:
    command = [sys.executable, "-m", "tcm", "recipes", "show", "digits", "*.steps=20"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stderr == "note: diffusion.warmup=50 is too long for steps=20; it is now 2\n"

"""A shipped recipe on other data than its own: shape, classes and sigma_data become those of the data."""

from pathlib import Path

import numpy as np
import pytest

from tcm.foundation.errors import TcmError
from tcm.recipes.resolve import differences, resolve
from tcm.training.adapting import adapted


def saved(folder: Path, shape: tuple[int, ...], classes: int, spread: int = 255) -> str:
    rng = np.random.default_rng(0)
    arrays = {"images": rng.integers(0, spread + 1, (30, *shape), dtype=np.uint8)}
    if classes:
        arrays["labels"] = np.arange(30) % classes
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


@pytest.mark.parametrize("name", ["digits", "demo"])
def test_its_own_data_change_nothing(name: str) -> None:
    recipe = resolve(name)
    assert recipe.adapts
    assert differences(recipe, adapted(recipe)) == []


@pytest.mark.parametrize(("shape", "classes"), [((3, 16, 16), 3), ((1, 12, 20), 0), ((3, 32, 32), 10)])
def test_other_data(tmp_path: Path, shape: tuple[int, ...], classes: int) -> None:
    found = adapted(resolve("cifar10-small", [f"data.path={saved(tmp_path, shape, classes)}"]))
    assert (found.image_shape, found.classes, found.conditional) == (shape, classes or None, bool(classes))
    assert found.sigma_data == pytest.approx(1 / 3**0.5, abs=0.02)


def test_what_is_unconditional_stays_so(tmp_path: Path) -> None:
    found = adapted(resolve("digits", ["conditional=false", f"data.path={saved(tmp_path, (1, 8, 8), 2)}"]))
    assert not found.conditional


def test_what_the_user_gives_stays(tmp_path: Path) -> None:
    words = [f"data.path={saved(tmp_path, (1, 8, 8), 10)}", "sigma_data=0.1"]
    assert adapted(resolve("digits", words), {"data.path", "sigma_data"}).sigma_data == 0.1
    assert adapted(resolve("digits", words)).sigma_data > 0.5


def test_a_close_sigma_data_stays(tmp_path: Path) -> None:
    path = saved(tmp_path, (1, 8, 8), 10)
    assert adapted(resolve("digits", [f"data.path={path}", "sigma_data=0.6"])).sigma_data == 0.6


def test_a_network_that_does_not_fit_is_an_error_that_says_what_to_change(tmp_path: Path) -> None:
    with pytest.raises(TcmError, match=r"data.path=.*data.npz does not fit: .*channel_mult"):
        adapted(resolve("cifar10-small", [f"data.path={saved(tmp_path, (3, 30, 30), 3)}"]))


def test_the_papers_recipes_do_not_adapt(tmp_path: Path) -> None:
    recipe = resolve("cifar10", [f"data.path={saved(tmp_path, (3, 8, 8), 3)}"])
    assert adapted(recipe) is recipe

"""A plan: a recipe that fits its data, its budget and its machine, from the command line too."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import Launcher
from PIL import Image
from vector_condition import HalvesData, VectorConfig, VectorKind

from tcm.cli.plan import parse_budget, prepared_data
from tcm.cli.planned_run import planned_recipe, warn_of_changed_images
from tcm.cli.train import train
from tcm.data.dataset import ArrayDataset, ClassLabels
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.processes import Processes
from tcm.planning import rules
from tcm.planning.look import check_enough, look_at
from tcm.planning.plan import Planner, make_plan
from tcm.recipes.resolve import differences, resolve
from tcm.recipes.schema import Recipe
from tcm.training.adapting import check_data

CPU = Processes(torch.device("cpu"))
SIDES = st.integers(4, 40)


def images(count: int, *shape: int, classes: int = 0) -> ArrayDataset:
    rng = np.random.default_rng(0)
    names = tuple(f"class {k}" for k in range(classes))
    labels = ClassLabels.of(np.arange(count) % classes, "here", names) if classes else None
    return ArrayDataset(rng.integers(0, 256, (count, *shape), dtype=np.uint8), labels)


def planner(data: ArrayDataset, budget: float = 60.0) -> Planner:
    return Planner(data, "data.zip", look_at(data), budget, CPU, patience=0.02)


@settings(max_examples=8)
@given(SIDES, SIDES, st.sampled_from([1, 3]), st.sampled_from([0, 1, 3]), st.sampled_from(rules.WIDTHS))
def test_every_shape_and_every_number_of_classes_has_a_recipe(
    height: int, width: int, channels: int, classes: int, channels_wide: int
) -> None:
    """A recipe is checked as it is made: its network takes the images, its times are in order."""
    data = images(6, channels, height, width, classes=classes)
    choices = planner(data).choices(channels_wide, 64, dict.fromkeys(rules.SHARES, 100))
    keys = {key: value for choice in choices for key, value in choice.keys.items()}
    assert keys["image_shape"] == [channels, height, width]
    assert keys.get("classes", 0) == classes
    assert all(choice.why for choice in choices)


def test_flat_images_have_a_recipe() -> None:
    """All images the same grey: no distance, no deviation."""
    data = ArrayDataset(np.full((10, 1, 8, 8), 128, np.uint8), None)
    choices = planner(data).choices(8, 128, dict.fromkeys(rules.SHARES, 100))
    assert {key: value for choice in choices for key, value in choice.keys.items()}["t_max"] > 0


def test_other_conditions_are_planned_if_a_network_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = HalvesData()
    found = {choice.what: choice for choice in planner(data).choices(8, 128, dict.fromkeys(rules.SHARES, 100))}
    assert (
        "the images come with vectors of 2 numbers, but no installed network takes them" in found["no conditions"].why
    )
    assert found["no conditions"].keys == {"conditional": False}
    declare_networks(tmp_path, vectors="vector_condition:VectorConfig", hungry=f"{__name__}:HungryConfig")
    monkeypatch.syspath_prepend(tmp_path)
    own = Planner(data, "vector_condition:HalvesData", look_at(data), 1200.0, CPU, patience=0.02)
    plan = own.plan(lambda text: None)
    (tmp_path / "planned.toml").write_text(plan.toml())
    recipe = resolve(str(tmp_path / "planned.toml"))
    assert differences(recipe, plan.recipe) == []
    assert (recipe.conditional, recipe.condition, recipe.network.kind) == (True, VectorKind(2), "vectors")
    assert not recipe.data.flip, "a vector says what is left and what is right"
    assert check_data(recipe, data) == VectorKind(2)
    assert "# the network 'vectors': it takes vectors of 2 numbers" in plan.toml()


class HungryConfig(VectorConfig):
    """A plan cannot know its layers."""

    layers: int


def declare_networks(folder: Path, **networks: str) -> None:
    """The entry points of an installed package."""
    about = folder / "mine-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    lines = [f"{name} = {value}\n" for name, value in sorted(networks.items())]
    (about / "entry_points.txt").write_text("[tcm.networks]\n" + "".join(lines))


def test_memory_decides_about_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcm.planning.plan.free_memory", lambda device: 40e6)
    choices = planner(images(6, 3, 16, 16)).choices(8, 128, dict.fromkeys(rules.SHARES, 100))
    assert choices[-1].keys["stages.truncated.accumulation"] > 1


def test_a_plan_fills_its_budget_and_its_file_is_its_recipe(tmp_path: Path) -> None:
    plan = planner(images(64, 1, 8, 8, classes=2), 1200.0).plan(lambda text: None)
    assert 0.8 * 1200 < sum(plan.seconds.values()) <= 1200
    file = tmp_path / "planned.toml"
    file.write_text(plan.toml())
    assert differences(resolve(str(file)), plan.recipe) == []
    assert plan.recipe.stages["consistency"].steps >= 100


def test_a_budget_that_is_too_small_says_what_is_enough() -> None:
    with pytest.raises(TcmError, match=r"--budget=0\.000167m has time for \d+ steps .* give \d+m"):
        planner(images(64, 1, 8, 8), 0.01).plan(lambda text: None)


@pytest.mark.parametrize("text", ["", "h", "2", "2 days", "0m", "-1h", "1m2h"])
def test_what_is_not_a_budget(text: str) -> None:
    with pytest.raises(TcmError, match="is not a time; write it like 20m, 2h or 1h30m"):
        parse_budget(text)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes, several sizes, one grey picture, one broken file."""
    rng = np.random.default_rng(0)
    for kind in ("cats", "dogs"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(4):
            pixels = rng.integers(0, 256, (40 + number, 70, 3), dtype=np.uint8)
            Image.fromarray(pixels[..., 0] if number == 3 else pixels).save(
                tmp_path / "photos" / kind / f"{number}.png"
            )
    (tmp_path / "photos" / "dogs" / "broken.png").write_bytes(b"not a picture")
    return tmp_path / "photos"


def tcm(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code and output of a command in a folder."""
    return Launcher(folder, inside=folder).run(*words)


@pytest.mark.long  # an hour, so that a slow machine, busy with other tests, has a plan too
def test_from_a_folder_of_photographs_to_samples(photos: Path) -> None:
    folder = photos.parent
    short = [f"{stage}.{word}" for stage in rules.SHARES for word in ("steps=2", "batch=8", "sample_every=0")]
    code, text = tcm(folder, "train", "photos", "--budget", "1h", "diffusion.warmup=0", *short)
    assert code == 0, text
    assert "broken.png" in text
    assert resolve(str(folder / "runs" / "photos" / "recipe.toml")).classes == 2
    assert (folder / "runs" / "photos" / "plan.toml").read_text().startswith("# ")
    code, text = tcm(folder, "train", "photos", "diffusion.warmup=0", *short)
    assert (code, "done: runs/photos" in text) == (0, True)
    code, text = tcm(folder, "sample", "runs/photos/2-truncated/model", "--class", "dogs", "-n", "2")
    assert code == 0, text


def test_the_command(tmp_path: Path) -> None:
    np.savez(tmp_path / "small.npz", images=images(32, 1, 4, 4).pixels(np.arange(32)))
    code, text = tcm(tmp_path, "plan", "small.npz", "--budget", "20m", "--json")
    assert code == 0, text
    plan = json.loads(text.splitlines()[-1])
    assert sum(plan["seconds"].values()) <= 1200
    recipe = resolve(str(tmp_path / "recipe.toml"))
    assert (recipe.conditional, recipe.image_shape) == (False, (1, 4, 4))
    code, text = tcm(tmp_path, "plan", "small.npz")
    assert (code, "--out=recipe.toml exists" in text) == (2, True)


@pytest.mark.parametrize("what", ["digits", "run"])
def test_a_budget_is_not_for_recipes_and_runs(tmp_path: Path, what: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text('extends = "digits"\n')
    code, text = tcm(tmp_path, "train", what, "--budget", "3m")
    assert (code, "says how many steps to train" in text) == (2, True)


@pytest.fixture
def planned_run(photos: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run on `photos` that has begun."""
    monkeypatch.chdir(photos.parent)
    run = Path("runs/photos")
    with pytest.warns(TcmWarning, match=r"data\.zip has few images, 8: .* 1,000 or more are enough"):
        planned_recipe("photos", run, "1h", CPU)
    (run / "plan.toml").rename(run / "recipe.toml")
    return run


def test_a_run_is_resumed_only_with_its_own_images_and_budget(planned_run: Path, photos: Path) -> None:
    recipe = str(planned_run / "recipe.toml")
    assert planned_recipe("photos", planned_run, None, CPU) == recipe
    assert planned_recipe(str(photos), planned_run, "60m", CPU) == recipe
    with pytest.raises(TcmError, match=r"--budget=2h: runs/photos was planned for 1h; leave --budget out"):
        planned_recipe("photos", planned_run, "2h", CPU)
    other = photos.rename(photos.with_name("other"))
    with pytest.raises(TcmError, match=r"was planned from .*/photos, not from .*/other; give another --run"):
        planned_recipe(str(other), planned_run, None, CPU)
    (planned_run / "planned.json").unlink()
    with pytest.raises(TcmError, match=r"was not planned from photos; resume it with `tcm train runs/photos`"):
        planned_recipe("photos", planned_run, None, CPU)


def test_prepared_images_are_used_again_only_for_the_same_data(planned_run: Path, photos: Path) -> None:
    """As after a budget that was too small: what was prepared stays, and so does what it was made from."""
    (planned_run / "recipe.toml").unlink()
    before = (planned_run / "data.zip").stat().st_mtime_ns
    with pytest.warns(TcmWarning, match="few images, 8"):
        planned_recipe("photos", planned_run, "2h", CPU)
    assert (planned_run / "data.zip").stat().st_mtime_ns == before
    (photos / "cats" / "0.png").unlink()
    with pytest.warns(TcmWarning, match="few images, 7"):
        planned_recipe("photos", planned_run, "2h", CPU)
    photos.rename(photos.with_name("other"))
    with pytest.raises(TcmError, match=r"not from .*/other"):
        planned_recipe("other", planned_run, "2h", CPU)


def test_a_run_whose_plan_is_not_made_is_resumed_with_its_images(planned_run: Path, photos: Path) -> None:
    """Its own folder has no recipe yet, so that `tcm train` takes it for images."""
    (planned_run / "recipe.toml").unlink()
    with pytest.raises(TcmError, match=f"resume it with `tcm train {photos} --run runs/photos`"):
        planned_recipe("runs/photos", planned_run, None, CPU)


def test_a_run_does_not_go_on_with_images_that_have_changed(planned_run: Path, photos: Path) -> None:
    """Unless the run itself is named, whose images were prepared; a new time is no change."""
    noted = (planned_run / "planned.json").read_text()
    warn_of_changed_images(planned_run)
    os.utime(photos / "cats" / "0.png", (1e9, 1e9))
    planned_recipe("photos", planned_run, None, CPU)
    assert (planned_run / "planned.json").read_text() != noted, "the new time is noted"
    before = (photos / "cats" / "0.png").read_bytes()
    remedies = r"another --run, put the old ones back, or go on with them as they were: tcm train runs/photos"
    for change in (photos / "cats" / "new.png", photos / "cats" / "0.png"):
        change.write_bytes((photos / "dogs" / "1.png").read_bytes())
        with pytest.raises(TcmError, match=f"photos has changed since runs/photos was planned from it; .*{remedies}"):
            planned_recipe("photos", planned_run, None, CPU)
        with pytest.warns(TcmWarning, match=r"runs/photos goes on with the images as they were, in data\.zip"):
            warn_of_changed_images(planned_run)
        (photos / "cats" / "new.png").unlink(missing_ok=True)
    (photos / "cats" / "0.png").write_bytes(before)
    planned_recipe("photos", planned_run, None, CPU)
    for file in photos.rglob("*.png"):
        file.unlink()
    with pytest.warns(TcmWarning, match=r"runs/photos goes on with the images as they were, in data\.zip"):
        warn_of_changed_images(planned_run)


def test_a_run_that_was_planned_by_the_version_before(planned_run: Path) -> None:
    noted = json.loads((planned_run / "planned.json").read_text())
    (planned_run / "planned.json").write_text(json.dumps({key: noted[key] for key in ("data", "budget")}))
    planned_recipe("photos", planned_run, None, CPU)
    assert json.loads((planned_run / "planned.json").read_text()) == noted


@pytest.mark.parametrize("budget", ["1s", "10000h", "soon"])
def test_what_cannot_be_planned_leaves_nothing(tmp_path: Path, budget: str) -> None:
    np.savez(tmp_path / "small.npz", images=images(1000, 1, 4, 4).pixels(np.arange(1000)))
    with pytest.raises(TcmError, match="--budget"):
        planned_recipe(str(tmp_path / "small.npz"), tmp_path / "run", budget, CPU)
    assert [path.name for path in tmp_path.iterdir()] == ["small.npz"]


BLACK = np.zeros((300, 3, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("pixels", "problem"),
    [
        (images(1, 3, 8, 8).pixels(np.arange(1)), "only one image, .* 1,000 different images or more"),
        (BLACK, "the same image 300 times, .* 1,000 different images or more"),
        (images(2000, 3, 1, 1).pixels(np.arange(2000)), r"images of 1×1 pixels, .* at least 4×4"),
    ],
    ids=["one", "black", "pixels"],
)
def test_hopeless_data_are_refused_before_anything_is_timed(pixels: np.ndarray, problem: str) -> None:
    with pytest.raises(TcmError, match=f"^photos has {problem}"):
        make_plan(ArrayDataset(pixels), "photos", 3600, CPU, lambda text: None)


def test_poor_data_are_warned_of() -> None:
    few = images(11, 1, 8, 8)
    with pytest.warns(TcmWarning, match=r"photos has few images, 11: .* 1,000 or more are enough"):
        check_enough(look_at(few), "photos")
    repeated = ArrayDataset(few.pixels(np.arange(2000) % 11))
    with pytest.warns(TcmWarning, match="few images, 11 different ones among 2,000"):
        check_enough(look_at(repeated), "photos")
    check_enough(look_at(images(1000, 1, 8, 8)), "photos")


@pytest.mark.parametrize("speed", [3e3, 3e5, 1e7])
def test_reasons_say_what_happened(speed: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On machines that draw so many images a second with one channel, whatever the stage."""

    def seconds(draft: Recipe, name: str, *rest: object) -> float:
        return draft.stages[name].batch * draft.network.model_dump()["channels"] / speed

    monkeypatch.setattr("tcm.planning.plan.seconds_per_step", seconds)
    plan = planner(images(64, 1, 8, 8), 200.0).plan(lambda text: None)
    stage, width = plan.recipe.stages["diffusion"], plan.recipe.network.model_dump()["channels"]
    whys = " ".join(choice.why for choice in plan.choices)
    seen = stage.steps * stage.batch
    assert f"time for {seen:,} images" in whys
    assert ("fewer than the 150,000 that are wanted" in whys) == (seen < 150_000)
    assert (f"with {2 * width} channels, for" in whys) == (width < 128)
    fewest = min(stage.steps for stage in plan.recipe.stages.values())
    assert (f"only {fewest:,} of the 400 steps" in whys) == (fewest < 400)
    assert ("that leave 400 steps" in whys) == (fewest >= 400)


def test_the_reason_for_t_prime_is_the_bound_that_holds() -> None:
    data = images(64, 1, 8, 8)
    assert "t' is 1.5 sigma_data" in rules.times(look_at(data)).why
    near = ArrayDataset((np.indices((10, 8))[0][:, None, :, None].repeat(8, 3) + 120).astype(np.uint8))
    assert "(T is at least 1); t' is 1.5" in rules.times(look_at(near)).why
    spots = np.zeros((2, 1, 4, 4), np.uint8)
    spots[1, 0, :2] = 128
    spots[:, 0, 3] = 255
    assert "t' is T/5, as 1.5 sigma_data is more" in rules.times(look_at(ArrayDataset(spots))).why


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"recipe": "Photoz", "budget": "2h"}, r"Photoz does not exist; did you mean photos\?"),
        ({"recipe": "cifar01"}, r"cifar01 does not exist; did you mean cifar10\?"),
        ({"recipe": "nowhere/to/be/found.toml"}, "does not exist; give your images, a recipe .* or a run"),
        ({"recipe": "digits", "budget": "2h"}, "'digits' says how many steps to train"),
        ({"recipe": "photos", "init": "digits"}, "--init=digits has no use in a plan, .* leave it out, .* --data"),
        ({"recipe": "digits", "init": "/no/such"}, "--init=/no/such has no use: .* with diffusion.init=init"),
        ({"recipe": "digits", "init": "fashion-mnist"}, "--init=fashion-mnist has no use"),
        ({"recipe": "digits", "init": "/no/such", "overrides": ["diffusion.init=init"]}, "--init: /no/such is not"),
        ({"recipe": "digits", "init": "fashion-mnist", "overrides": ["diffusion.init=init"]}, "diffusion.init=init"),
    ],
    ids=str,
)  # fmt: skip
def test_words_that_mean_nothing_here(
    words: dict[str, Any], error: str, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)
    with pytest.raises(TcmError, match=error):
        train(**words)
    assert not (photos.parent / "runs" / "digits").exists(), "nothing is left of it"


def test_near_names_of_data(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos.parent)
    with pytest.raises(TcmError, match=r"no file or folder photoz; did you mean photos\?"):
        prepared_data("photoz", Path("data.zip"))


def test_a_plan_does_not_take_over_what_another_prepared(photos: Path) -> None:
    prepared_data(str(photos), photos.parent / "recipe-data.zip")
    with pytest.raises(TcmError, match=r"recipe-data\.zip exists already; remove it or choose another name"):
        prepared_data(str(photos / "cats"), photos.parent / "recipe-data.zip")

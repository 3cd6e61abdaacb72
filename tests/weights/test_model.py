"""The model folder: what is saved is what is loaded, and whatever is wrong with a folder is named."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from convert_card import converted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

import tcm
from tcm import Classes, ConsistencySampler, DDPMppConfig, EDM2Config, HeunSampler, Model, ModelCard, Sampler
from tcm.foundation.errors import TcmError
from tcm.foundation.files import new_folder
from tcm.weights import BUNDLED, Provenance, bundled_models, inspect

TINY = DDPMppConfig(channels=8, channel_mult=(1,), blocks=1)


def card(**changes) -> ModelCard:
    return ModelCard(**({"kind": "consistency", "network": TINY, "image_shape": (1, 4, 4)} | changes))


def lively(model: Model) -> Model:
    """Leave the initialisation, in which the last layers are nearly zero."""
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    lively(Model.fresh(card())).save(tmp_path / "model")
    return tmp_path / "model"


@st.composite
def cards(draw) -> ModelCard:
    mult = tuple(draw(st.lists(st.integers(1, 2), min_size=1, max_size=2)))
    side = st.integers(1, 2).map(lambda count: count * 2 ** len(mult))
    shared = {"channel_mult": mult, "blocks": 1, "attention": draw(st.sampled_from([(), (4,), (8, 4)]))}
    network = draw(
        st.sampled_from(
            [
                DDPMppConfig(channels=8, dropout=0.1, noise_mult=2, **shared),
                EDM2Config(channels=16, **shared),
                EDM2Config(channels=64, dropout_up_to=4, dropout=0.5, **shared),
            ]
        )
    )
    kind = draw(st.sampled_from(["diffusion", "consistency", "truncated"]))
    t_min = draw(st.floats(1e-3, 2))
    return card(
        kind=kind,
        network=network,
        image_shape=(draw(st.integers(1, 3)), draw(side), draw(side)),
        condition=draw(st.sampled_from([None, Classes(3)])),
        sigma_data=draw(st.floats(0.1, 2)),
        t_min=t_min,
        t_max=draw(st.floats(5, 100)),
        sampler=HeunSampler() if kind == "diffusion" else ConsistencySampler(second_time=draw(st.floats(2, 4))),
        extra=draw(st.sampled_from([{}, {"sigma_0": 2.5, "note": ["a"]}])),
        uncertainty=draw(st.sampled_from([0, 8])),
        provenance=Provenance(recipe=draw(st.none() | st.text(max_size=5)), step=draw(st.none() | st.integers(0, 9))),
    )


@settings(max_examples=25)
@given(cards())
def test_loading_gives_back_what_was_saved(tmp_path_factory, chosen: ModelCard) -> None:
    """Card, tensors and, what tensors alone would not show, the images."""
    folder = tmp_path_factory.mktemp("models") / "model"
    model = lively(Model.fresh(chosen))
    model.save(folder)
    loaded = tcm.load(folder)
    assert loaded.card == chosen
    state, again = model.denoiser.state_dict(), loaded.denoiser.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in state.items())
    steps = 2
    assert torch.equal(loaded.sample(2, steps=steps, seed=7), model.sample(2, steps=steps, seed=7))
    denoiser = loaded.denoiser
    assert (denoiser.t_min, denoiser.t_max, denoiser.sigma_data) == (chosen.t_min, chosen.t_max, chosen.sigma_data)
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_loaded_model_trains(saved: Path) -> None:
    model = tcm.load(saved)
    assert all(parameter.requires_grad for parameter in model.denoiser.parameters())
    model.denoiser(torch.zeros(1, 1, 4, 4), torch.ones(1)).sum().backward()


def test_half_the_bytes(tmp_path: Path) -> None:
    model = tcm.load("digits")
    model.save(tmp_path / "whole")
    model.save(tmp_path / "half", half=True)
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "whole")]
    assert sizes[0] < 0.6 * sizes[1]
    loaded = tcm.load(tmp_path / "half")
    for name, tensor in loaded.denoiser.state_dict().items():
        own = model.denoiser.state_dict()[name]
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, own.half().float() if own.ndim > 1 else own, rtol=0, atol=0)
    torch.testing.assert_close(loaded.sample(4), model.sample(4), rtol=0, atol=0.02)


def test_saving_replaces_a_model_and_leaves_nothing_beside_it(saved: Path) -> None:
    other = lively(Model.fresh(card(condition=Classes(2))))
    other.save(saved)
    assert tcm.load(saved).card.condition == Classes(2)
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_saving_never_deletes_anything_else(tmp_path: Path, saved: Path) -> None:
    model = Model.fresh(card())
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(TcmError, match=r"thesis holds chapter.tex, which saving a model there would delete"):
        model.save(tmp_path / "thesis")
    (saved / "README.md").write_text("mine")
    with pytest.raises(TcmError, match=r"README.md"):
        model.save(saved)
    with pytest.raises(TcmError, match=r"README.md is a file"):
        model.save(saved / "README.md")
    assert (saved / "README.md").read_text() == "mine"
    assert (tmp_path / "thesis" / "chapter.tex").exists()


def test_a_failing_save_changes_nothing(saved: Path) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}

    def fail() -> None:
        with new_folder(saved) as folder:
            (folder / "config.json").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("network.conv_in.weight"), r"lacks network.conv_in.weight"),
        (lambda tensors: tensors.update(surplus=torch.zeros(1)), r"has surplus, which this network does not have"),
        (
            lambda tensors: tensors.update({"network.conv_out.bias": torch.zeros(7)}),
            r"network.conv_out.bias has shape \[7\], but this network needs \[1\]",
        ),
        (lambda tensors: tensors.clear(), r"lacks .*, .*, .* and \d+ more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved: Path, change, message: str) -> None:
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, saved / "model.safetensors")
    for read in (tcm.load, inspect):
        with pytest.raises(TcmError, match=message):
            read(saved)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_an_error_of_one_short_line_or_no_error(tmp_path: Path, name: str, data) -> None:
    """Cut anywhere, or with any bytes changed: a TcmError, and nothing else."""
    folder = tmp_path / "model"
    if not folder.exists():
        lively(Model.fresh(card())).save(folder)
        (folder / name).rename(tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    head = min(len(whole), 3000)  # where the structure is
    cut = data.draw(st.integers(0, len(whole)) | st.integers(0, head))
    content = bytearray(whole[:cut])
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, head), st.integers(0, 255)), max_size=3)):
        if place < len(content):
            content[place] = byte
    (folder / name).write_bytes(content)
    for read in (tcm.load, inspect):
        message = name
        try:
            read(folder)
        except TcmError as error:
            message = str(error)
        assert name in message
        assert "\n" not in message
        assert len(message) < 700


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_missing_files_are_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    with pytest.raises(TcmError, match=rf"{name} does not exist; a model folder holds"):
        tcm.load(saved)
    (saved / name).mkdir()
    with pytest.raises(TcmError, match=name):
        tcm.load(saved)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"t_min": 90.0}, "t_min=90.0 must lie below t_max=80.0"),
        ({"kind": ""}, "kind=''"),
        ({"sampler": {"kind": "ddim"}}, "sampler.kind='ddim' is unknown; use one of consistency, heun"),
        ({"sampler": {"second_time": 1.0}}, "sampler.kind is missing; add it"),
        ({"sampler": {"kind": "heun", "order": 2}}, "sampler.order is not a known key"),
        ({"sampler": {"kind": "consistency", "second_time": 0}}, "sampler: second_time=0 must be above 0"),
        ({"sampler": "heun"}, "sampler='heun' must be a table of keys"),
        ({"second_time": 1.0}, "second_time is not a known key"),
        ({"condition": {"kind": "classes", "count": 0}}, "condition: count=0"),
        (
            {"condition": {"kind": "classes", "count": 2, "names": ["cat"]}},
            "condition: names has 1 entries for count=2 classes",
        ),
        (
            {"condition": {"kind": "classes", "count": 2, "name": "cat"}},
            "condition.name is not a known key; did you mean 'names'?",
        ),
        ({"condition": {"kind": "classes"}}, "condition.count is missing; add it"),
        ({"condition": {"kind": "smells"}}, "condition.kind='smells' is unknown; use one of classes"),
        ({"classes": 10}, "classes is not a known key"),
        ({"sigma_data": 0}, "sigma_data=0"),
        ({"image_shape": [1, 0, 4]}, "image_shape[1]=0"),
        ({"image_shape": [1, 4]}, "image_shape"),
        ({"network": {"kind": "resnet"}}, "network.kind='resnet' is unknown; use one of ddpmpp, edm2"),
        ({"network": {"kind": "ddpmpp", "channel": 8}}, "network.channel is not a known key; did you mean 'channels'?"),
        ({"format": 5}, "format=5"),
        ({"colour": "red"}, "colour is not a known key"),
    ],
)
def test_a_wrong_config_names_key_and_value(saved: Path, changes: dict, message: str) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(TcmError, match=r"config.json") as caught:
        tcm.load(saved)
    assert message in str(caught.value)


def test_a_card_without_its_network_is_an_error(saved: Path) -> None:
    path = saved / "config.json"
    content = json.loads(path.read_text())
    del content["network"]
    path.write_text(json.dumps(content))
    with pytest.raises(TcmError, match="network is missing"):
        tcm.load(saved)


FORMAT_1 = {
    "library": "truncated-consistency",
    "format": 1,
    "kind": "truncated",
    "network": {
        "channels": 8,
        "channel_mult": [1, 2],
        "blocks": 1,
        "attention": [],
        "dropout": 0.0,
        "kind": "ddpmpp",
        "noise_mult": 1,
    },
    "image_shape": [1, 8, 8],
    "classes": 10,
    "sigma_data": 0.75,
    "t_min": 1.0,
    "t_max": 80.0,
    "t_prime": 1.0,
    "second_time": 1.0,
    "uncertainty": 0,
    "provenance": {
        "recipe": "digits-long",
        "stage": "truncated",
        "step": 2250,
        "data": "0d31268a00d752e4e4714cedd02f57c5b4eb462a1ed8a48d983335f1fc77400e",
        "imported_from": None,
        "licence": "apache-2.0",
    },
}
"""The card of the bundled digits model as the first version would have written it."""


FORMAT_2 = {key: value for key, value in FORMAT_1.items() if key != "classes"} | {
    "format": 2,
    "sampler": "consistency",
    "condition": {"kind": "classes", "count": 10},
}


FORMAT_3 = {key: value for key, value in FORMAT_2.items() if key not in ("t_prime", "second_time")} | {
    "format": 3,
    "sampler": {"kind": "consistency", "second_time": 1.0},
}


@pytest.mark.parametrize("earlier", [FORMAT_1, FORMAT_2, FORMAT_3])
def test_models_from_before_the_first_release_are_converted(earlier: dict, tmp_path: Path) -> None:
    """The bundled model with the cards that it had."""
    folder = tmp_path / "digits"
    shutil.copytree(BUNDLED / "digits", folder, ignore=shutil.ignore_patterns("README.md"))
    (folder / "config.json").write_text(json.dumps(earlier))
    with pytest.raises(TcmError, match=rf"format={earlier['format']} .*; convert the file with tools/convert_card.py"):
        tcm.load(folder)
    (folder / "config.json").write_text(json.dumps(converted(earlier)))
    assert tcm.load(folder).card == tcm.load("digits").card == inspect(folder)


@pytest.mark.parametrize(
    ("changes", "sampler", "condition"),
    [
        ({"kind": "diffusion", "classes": 0, "t_min": 0.002, "t_prime": None}, HeunSampler(), None),
        ({"kind": "consistency", "classes": 1, "second_time": 3.0}, ConsistencySampler(second_time=3.0), Classes(1)),
    ],
)
def test_what_a_card_of_the_first_format_means(changes: dict, sampler: Sampler, condition: Classes | None) -> None:
    card = ModelCard.model_validate_json(json.dumps(converted(FORMAT_1 | changes)))
    assert (card.sampler, card.condition) == (sampler, condition)


def test_cards_are_frozen() -> None:
    with pytest.raises(ValidationError):
        card().t_max = 3.0


def test_nothing_is_unpickled(saved: Path) -> None:
    torch.save({"anything": torch.zeros(1)}, saved / "model.safetensors")
    with pytest.raises(TcmError, match="is damaged"):
        tcm.load(saved)


@pytest.mark.parametrize("path", ["no/such/folder", "./missing/model", "/nowhere", "~/model", "plain"])
def test_what_is_neither_folder_nor_hub_id(path: str) -> None:
    with pytest.raises(TcmError, match="is not a folder"):
        tcm.load(path)


@pytest.mark.parametrize("name", ["someone/does-not-exist", "some one/bad name"])
def test_a_hub_id_out_of_reach(tmp_path: Path, name: str) -> None:
    code = f"import tcm; tcm.load({name!r})"
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"TcmError: {name} is neither a folder nor a model on the hub" in done.stderr


def test_a_model_of_the_hubs_cache_is_loaded(saved: Path, tmp_path: Path) -> None:
    """The hub's own layout on disk, read without the network."""
    cache = tmp_path / "hub" / "models--someone--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    saved.rename(cache / "snapshots" / ("0" * 40))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    code = "import tcm; print(tcm.load('someone/tiny').card.kind)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "consistency", done.stderr


def test_image_i_is_the_same_in_any_batch_and_count() -> None:
    model = lively(Model.fresh(card(condition=Classes(3))))
    whole = model.sample(7, steps=2, seed=10)
    assert whole.shape == (7, 1, 4, 4)
    for batch in (1, 2, 5):
        torch.testing.assert_close(model.sample(7, steps=2, seed=10, batch=batch), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.sample(steps=2, seed=13), whole[3:4], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.sample(seeds=[16, 11], steps=2), whole[[6, 1]], rtol=1e-5, atol=1e-6)
    assert model.sample(seeds=[]).shape == (0, 1, 4, 4)


def test_labels_of_samples() -> None:
    model = lively(Model.fresh(card(condition=Classes(3))))
    drawn = model.sample(4)
    chosen = torch.cat([model.sample(1, seed=seed, labels=0) for seed in range(4)])
    torch.testing.assert_close(model.sample(4, labels=[0, 0, 0, 0]), chosen, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(drawn, chosen)
    for labels, message in (
        ([0, 1], "2 entries for 4 images"),
        ([0, 1, 2, 3], "between 0 and 2"),
        (-1, "between 0 and 2"),
    ):
        with pytest.raises(TcmError, match=message):
            model.sample(4, labels=labels)
    with pytest.raises(TcmError, match="labels=0 given, but this model is unconditional; leave labels out"):
        Model.fresh(card()).sample(1, labels=0)
    with pytest.raises(TcmError, match="condition given, but this model is unconditional; leave condition out"):
        Model.fresh(card()).sample(1, condition=tcm.Labels(torch.tensor([0])))


def test_times_and_steps_of_sampling() -> None:
    truncated = lively(Model.fresh(card(kind="truncated", t_min=1.0, sampler=ConsistencySampler(second_time=1.5))))
    assert truncated.sampler.times(truncated.denoiser, 1) == [80.0]
    assert truncated.sampler.times(truncated.denoiser, 2) == [80.0, 1.5]
    assert torch.equal(truncated.sample(2, steps=2), truncated.sample(2, times=[80.0, 1.5]))
    assert torch.equal(truncated.sample(2), truncated.sample(2, steps=1))
    with pytest.raises(TcmError, match=r"times\[1\]=0.821 is below 1, where this model is undefined"):
        truncated.sample(1, times=[80.0, 0.821])
    with pytest.raises(TcmError, match=r"times\[0\]=1.5 is not T=80.0"):
        truncated.sample(1, times=[1.5])
    diffusion = lively(Model.fresh(card(kind="diffusion")))
    assert torch.equal(diffusion.sample(2), diffusion.sample(2, steps=18))
    with pytest.raises(TcmError, match=r"times=\[80.0\] are for consistency models"):
        diffusion.sample(1, times=[80.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 2, "seeds": [1, 2, 3]}, "count=2 does not match the 3 seeds"),
        ({"steps": 1, "times": [80.0]}, "cannot both be given"),
        ({"count": 2, "batch": 0}, "batch=0 must be a whole number of at least 1"),
        ({"count": -1}, "count=-1"),
        ({"count": 0}, "count=0 must be"),
        ({"count": 2.5}, r"count=2\.5 must be"),
        ({"count": "4"}, "count='4' must be"),
        ({"steps": 0}, "steps=0"),
        ({"times": []}, "times is empty"),
    ],
)
def test_arguments_of_sampling_that_cannot_be_meant(arguments: dict, message: str) -> None:
    with pytest.raises(TcmError, match=message):
        Model.fresh(card()).sample(**arguments)


def test_labels_that_are_none() -> None:
    model = Model.fresh(card(condition=Classes(3)))
    for labels, message in (
        ("three", "labels='three': none of the 3 classes has this name"),
        (1.5, r"labels=1\.5 is not a class"),
        ([1, 2], "labels has 2 entries for 4 images"),
    ):
        with pytest.raises(TcmError, match=message):
            model.sample(4, labels=labels)


def test_loading_what_is_no_path() -> None:
    with pytest.raises(TcmError, match="3 is not a path; give a model folder"):
        tcm.load(3)


def test_a_model_is_shown_in_five_lines() -> None:
    provenance = Provenance(recipe="digits", stage="consistency")
    model = Model.fresh(card(condition=Classes(10), provenance=provenance))
    parameters = sum(parameter.numel() for parameter in model.denoiser.parameters())
    assert repr(model).splitlines() == [
        "Model: consistency, 1×4×4 images, 10 classes",
        f"  network: ddpmpp, {parameters:,} parameters",
        "  times: 0.002 to 80, sigma_data 0.5",
        "  sampler: times 80 by default",
        "  from: consistency of digits",
    ]
    assert len(repr(tcm.load("digits")).splitlines()) == 5
    assert "Heun, 18 steps" in repr(Model.fresh(card(kind="diffusion", sampler=HeunSampler())))


def test_moving_a_model_returns_it() -> None:
    model = Model.fresh(card())
    assert model.to("cpu") is model


@pytest.mark.parametrize("name", bundled_models())
def test_bundled_models_are_small_draw_offline_and_have_a_card(name: str) -> None:
    folder = BUNDLED / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6
    model = tcm.load(name)
    images = model.sample(20, labels=[index % 10 for index in range(20)])
    assert images.shape == (20, *model.card.image_shape)
    assert float(images.std(0).mean()) > 0.2, "they differ"
    scores = (folder / "README.md").read_text("utf-8").partition("## Scores")[2]
    assert "| 5,000 |" in scores

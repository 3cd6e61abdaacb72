"""`tcm sample`, `tcm eval`, `tcm times` as a user calls them; two real processes against one."""

import json
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import Launcher
from PIL import Image
from typer.testing import CliRunner

import tcm
from tcm.cli.main import app
from tcm.data import ArrayDataset, open_dataset
from tcm.data.dataset import ClassLabels
from tcm.evaluation.generation import conditions_of
from tcm.evaluation.scores import Score, read_scores
from tcm.evaluation.second_time import save_second_time
from tcm.foundation.errors import TcmError
from tcm.method.conditions import Labels
from tcm.networks.ddpmpp import DDPMpp
from tcm.recipes.resolve import resolve, to_toml


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    network = tcm.DDPMppConfig(channels=16, channel_mult=(1,), blocks=1)
    for kind, extra in (("consistency", {}), ("diffusion", {}), ("truncated", {"t_min": 1.0})):
        card = {
            "kind": kind,
            "network": network,
            "image_shape": (1, 8, 8),
            "condition": {"kind": "classes", "count": 10},
            "t_max": 10.0,
            **extra,
        }
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = tcm.Model.fresh(tcm.ModelCard.model_validate(card))
            for parameter in model.denoiser.parameters():
                parameter.data += 0.1 * torch.randn_like(parameter)
        model.save(folder / kind)
    return folder


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TCM_DATA", str(tmp_path / "cache"))


def run(*arguments: object) -> str:
    """What a command prints to stdout."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=True)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def said(*arguments: object) -> str:
    """What a command prints to stderr."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False).stderr


def in_two_processes(folder: Path, *arguments: object) -> None:
    environment = {"TCM_DATA": str(folder / "cache of two")}
    ended = Launcher(folder).run_ranks(2, *map(str, arguments), environment=environment)
    assert [code for code, _ in ended] == [0, 0], ended


def test_every_output_holds_the_same_pixels(models: Path) -> None:
    model = models / "consistency"
    said = run("sample", model, "-n", 9, "--seed", 3, "--steps", 2, "--out", "a.npz")
    assert "9 images (times 10, 1, fp32)" in said
    assert "images/s" in said
    images = np.load("a.npz")["images"]
    run("sample", model, "--seeds", "3-11", "--times", "10,1", "--batch", 2, "--out", "folder")
    run("sample", model, "--seeds", "3-11", "--steps", 2, "--batch", 5, "--out", "b.zip")
    run("sample", model, "--seeds", "3-11", "--steps", 2, "--out", "grid.png")
    assert sorted(path.name for path in Path("folder").iterdir()) == [f"{seed:06d}.png" for seed in range(3, 12)]
    folder = np.stack([np.asarray(Image.open(path)) for path in sorted(Path("folder").iterdir())])
    with zipfile.ZipFile("b.zip") as archive:
        zipped = np.stack([np.asarray(Image.open(BytesIO(archive.read(name)))) for name in archive.namelist()])
    grid = np.asarray(Image.open("grid.png"))
    scale = len(grid) // 26  # three images of 8 pixels and two gaps of one
    small = grid[::scale, ::scale]
    tiled = np.stack([small[9 * row : 9 * row + 8, 9 * column : 9 * column + 8] for row, column in np.ndindex(3, 3)])
    for found in (folder, zipped, tiled):
        np.testing.assert_array_equal(found, images[:, 0])
    again = tcm.load(model).sample(9, steps=2, seed=3)
    np.testing.assert_array_equal(tcm_pixels(again), images)


def tcm_pixels(images: torch.Tensor) -> np.ndarray:
    return np.clip(np.trunc(images.double().numpy() * 127.5 + 128), 0, 255).astype(np.uint8)


def test_two_processes_draw_the_same_images_and_the_same_score(models: Path, tmp_path: Path) -> None:
    model = models / "consistency"
    run("sample", model, "-n", 7, "--out", "one.npz")
    in_two_processes(tmp_path, "sample", model, "-n", 7, "--batch", 2, "--out", tmp_path / "two.npz")
    np.testing.assert_array_equal(np.load("one.npz")["images"], np.load("two.npz")["images"])
    options = ["--data", "digits", "--detector", "digits", "-n", 101, "--metrics", "fid,kid,is,precision-recall"]
    run("eval", model, *options, "--dfid", "0.5", "--scores", "one.jsonl")
    scores = tmp_path / "two.jsonl"
    in_two_processes(tmp_path, "eval", model, *options, "--dfid", "0.5", "--batch", 17, "--scores", scores)
    one, two = read_scores(Path("one.jsonl")), read_scores(Path("two.jsonl"))
    assert [(score.metric, score.t) for score in one] == [(score.metric, score.t) for score in two]
    for a, b in zip(one, two, strict=True):
        assert b.value == pytest.approx(a.value, rel=1e-6, abs=1e-6), a.label
        assert (a.count, a.reference_count, a.subject_hash) == (b.count, b.reference_count, b.subject_hash)


def test_a_folder_of_samples_scores_as_the_model_that_drew_them(models: Path) -> None:
    run("sample", models / "consistency", "-n", 80, "--out", "folder")
    shared = ["--data", "digits", "--detector", "digits"]
    run("eval", models / "consistency", "-n", 80, *shared, "--scores", "model.jsonl")
    said = run("eval", "folder", *shared, "--scores", "folder.jsonl")
    assert "digits distance" in said
    assert "FID" not in said
    assert read_scores(Path("folder.jsonl"))[0].value == pytest.approx(
        read_scores(Path("model.jsonl"))[0].value, rel=1e-6
    )
    assert "+0" in run("eval", "--compare", "model.jsonl", "folder.jsonl")
    run("eval", models / "consistency", "-n", 81, *shared, "--scores", "more.jsonl")
    with pytest.raises(TcmError, match="count: 80 and 81"):
        run("eval", "--compare", "model.jsonl", "more.jsonl")


def test_times_finds_and_writes_the_best(models: Path) -> None:
    folder = Path("copy")
    tcm.load(models / "truncated").save(folder)
    options = ["--data", "digits", "--detector", "digits", "-n", 70, "--grid", "1,2,4"]
    said = run("times", folder, *options, "--plot", "times.png", "--write")
    assert "best second time" in said
    assert Image.open("times.png").size[0] > 300
    best = json.loads((folder / "config.json").read_text())["sampler"]["second_time"]
    assert best in (1.0, 2.0, 4.0)
    assert f"best second time: {best:.4g}" in said
    found = tcm.load(folder)
    assert found.sampler.times(found.denoiser, 2) == [10.0, best]
    with pytest.raises(TcmError, match="is below 1"):
        run("times", folder, "--data", "digits", "--detector", "digits", "-n", 70, "--grid", "0.5")
    with pytest.raises(TcmError, match="=20 is above 10"):
        run("times", folder, "--data", "digits", "--detector", "digits", "-n", 70, "--grid", "1,20")
    with pytest.raises(TcmError, match="not a local folder"):
        run("times", "someone/model", "--data", "digits", "--detector", "digits", "--write")
    diffusion = models / "diffusion"
    with pytest.raises(TcmError, match="diffusion is a diffusion model, which has no second time"):
        run("times", diffusion, "--data", "digits", "--detector", "digits", "-n", 70)
    before = (diffusion / "config.json").read_bytes()
    with pytest.raises(TcmError, match="diffusion is a diffusion model, which has no second time"):
        save_second_time(diffusion, tcm.load(diffusion), 1.0)
    assert (diffusion / "config.json").read_bytes() == before


def a_run(models: Path) -> Path:
    """A run whose second stage is its last finished one."""
    folder = Path("a run")
    for name, kind in (("0-diffusion", "diffusion"), ("1-consistency", "consistency"), ("10-again", "truncated")):
        tcm.load(models / kind).save(folder / name / "model")
    (folder / "11-more" / "state").mkdir(parents=True)
    (folder / "recipe.toml").touch()
    return folder


def test_a_run_stands_for_its_last_finished_stage(models: Path) -> None:
    folder = a_run(models)
    line = "a run: using 10-again, the last finished stage\n"
    assert said("sample", folder, "-n", 4, "--out", "run.npz").startswith(line)
    run("sample", models / "truncated", "-n", 4, "--out", "model.npz")
    np.testing.assert_array_equal(np.load("run.npz")["images"], np.load("model.npz")["images"])
    assert tcm.load(folder).card == tcm.load(str(folder)).card == tcm.load(models / "truncated").card
    shared = ["--data", "digits", "--detector", "digits", "-n", 70]
    assert said("eval", folder, *shared).startswith(line)
    assert read_scores(folder / "scores.jsonl")[0].subject == "a run/10-again/model"
    assert said("times", folder, *shared, "--grid", "1,2", "--write").startswith(line)
    assert json.loads((folder / "10-again" / "model" / "config.json").read_text())["sampler"]["second_time"] in (1, 2)
    assert said("export", folder, "--to", "edm-state-dict").startswith(line)
    assert (folder / "10-again" / "model-edm.safetensors").is_file()


def test_a_run_without_a_finished_stage() -> None:
    (Path("run") / "0-diffusion" / "state").mkdir(parents=True)
    (Path("run") / "recipe.toml").touch()
    for call in (lambda: run("sample", "run"), lambda: tcm.load("run")):
        with pytest.raises(
            TcmError, match="run is a run without a finished stage; train it first, with `tcm train run`"
        ):
            call()


def test_other_samples_are_not_mixed_or_lost(models: Path) -> None:
    model = models / "consistency"
    for out in ("folder", "a.npz", "a.zip", "grid.png"):
        run("sample", model, "-n", 3, "--out", out)
    (Path("folder") / "notes.txt").touch()
    kept = {path: path.read_bytes() for path in (*Path("folder").iterdir(), Path("a.npz"), Path("a.zip"))}
    with pytest.raises(TcmError, match=r"out=folder holds other images, such as 000000.png; .* pass --overwrite"):
        run("sample", model, "-n", 2, "--seed", 5, "--out", "folder")
    for archive in ("a.npz", "a.zip"):
        with pytest.raises(TcmError, match=rf"out={archive} exists; name another one, or pass --overwrite"):
            run("sample", model, "-n", 2, "--seed", 5, "--out", archive)
    assert {path: path.read_bytes() for path in kept} == kept
    with pytest.raises(TcmError, match="class"):
        run("sample", model, "--class", "wrong", "--out", "folder", "--overwrite")
    assert {path: path.read_bytes() for path in kept} == kept, "nothing is removed before there is something new"
    own = [Path("folder/2023/0001.png"), Path("folder/42.png")]
    own[0].parent.mkdir()
    for file in own:
        file.touch()
    for out in ("folder", "a.npz", "a.zip"):
        run("sample", model, "-n", 2, "--seed", 5, "--out", out, "--overwrite")
    run("sample", model, "-n", 2, "--seed", 5, "--out", "grid.png")
    assert all(file.exists() for file in own), "what a user keeps there"
    names = ["000005.png", "000006.png", "2023", "42.png", "notes.txt"]
    assert sorted(path.name for path in Path("folder").iterdir()) == names
    assert np.load("a.npz")["seeds"].tolist() == [5, 6]


def test_times_says_when_the_best_is_at_the_edge(models: Path) -> None:
    options = ["--data", "digits", "--detector", "digits", "-n", 70, "--grid", "4"]
    said = run("times", models / "truncated", *options)
    assert "note: the best time is the lowest that was tried; try lower ones too: --grid 2,2.83,4,5.66" in said


def test_eval_as_json(models: Path) -> None:
    options = ["--data", "digits", "--detector", "digits", "-n", 70, "--reference-count", 500, "--json"]
    for number in (1, 2):
        printed = json.loads(run("eval", models / "consistency", *options, "--scores", f"{number}.jsonl"))
        assert Score(**printed[0]) == read_scores(Path(f"{number}.jsonl"))[0]
        assert printed[0]["reference_count"] == 500
    (pair,) = json.loads(run("eval", "--compare", "1.jsonl", "2.jsonl", "--json"))
    assert pair["first"]["value"] == pair["second"]["value"]


def test_published_statistics_as_the_reference(models: Path) -> None:
    np.savez("edm.npz", mu=np.zeros(64), sigma=np.eye(64))
    run("eval", models / "consistency", "--data", "edm.npz", "--detector", "digits", "-n", 70)
    assert read_scores(Path("scores.jsonl"))[0].reference_count is None
    with pytest.raises(TcmError, match="only statistics"):
        run("eval", models / "consistency", "--data", "edm.npz", "--detector", "digits", "-n", 70, "--dfid", "1")
    with pytest.raises(TcmError, match=r"--reference-count=100: edm\.npz holds statistics"):
        run("eval", models / "consistency", "--data", "edm.npz", "--detector", "digits", "--reference-count", 100)


def test_conditions_of_the_data(models: Path) -> None:
    """Where all images are threes, so are all samples."""
    images, _ = open_dataset("digits").read(np.arange(90))
    np.savez("threes.npz", images=images, labels=np.full(90, 3))
    shared = [models / "consistency", "--data", "threes.npz", "--detector", "digits", "-n", 70]
    run("eval", *shared, "--class", 3)
    run("eval", *shared, "--data-conditions")
    run("eval", *shared)
    threes, given, drawn = read_scores(Path("scores.jsonl"))
    assert given.value == pytest.approx(threes.value, rel=1e-6)
    assert drawn.value != pytest.approx(threes.value, rel=1e-3)
    assert (given.sampling, drawn.sampling) == ("times 10, fp32", "times 10, fp32")
    assert (threes.conditions, given.conditions, drawn.conditions) == ("chosen", "given", "drawn")
    found = [run("times", *shared, "--grid", "1,2", *options) for options in (["--data-conditions"], [])]
    assert found[0] != found[1]

    np.savez("bare.npz", images=images)
    np.savez("statistics.npz", mu=np.zeros(64), sigma=np.eye(64))
    for target, data, options, message in (
        (models / "consistency", "threes.npz", ["--class", 3], "both set the conditions; give one"),
        (models / "consistency", "bare.npz", [], "the data has no classes or other annotations"),
        (
            models / "consistency",
            "statistics.npz",
            [],
            "--data-conditions and --retrieval need images; give a data set",
        ),
        ("bare.npz", "threes.npz", [], "are for models"),
    ):
        with pytest.raises(TcmError, match=message):
            run("eval", target, "--data", data, "--detector", "digits", "-n", 70, "--data-conditions", *options)


def test_conditions_are_as_frequent_as_in_the_data() -> None:
    labels = ClassLabels.of([0] * 30 + [1] * 10, "here", ("many", "few"))
    conditions = conditions_of(ArrayDataset(np.zeros((40, 1, 2, 2), np.uint8), labels))
    drawn = conditions(range(2000))
    assert isinstance(drawn, Labels)
    assert float(drawn.index.float().mean()) == pytest.approx(0.25, abs=4 * (0.25 * 0.75 / 2000) ** 0.5)
    some = conditions(range(5, 8))
    assert isinstance(some, Labels)
    assert torch.equal(some.index, drawn.index[5:8]), "a seed's condition does not depend on the others"


def test_a_diffusion_model_is_sampled_with_heun(models: Path) -> None:
    assert "Heun, 3 steps, 5 evaluations" in run("sample", models / "diffusion", "--steps", 3, "-n", 2)
    with pytest.raises(TcmError, match="for consistency models"):
        run("sample", models / "diffusion", "--times", "10,1", "-n", 2)


def test_a_class_by_its_name(models: Path) -> None:
    model = tcm.load(models / "consistency")
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    card = model.card.model_copy(update={"condition": tcm.Classes(10, names)})
    tcm.Model(model.denoiser, card).save("named")
    assert ", cat, fp32" in run("sample", "named", "--class", "cat", "-n", 2, "--out", "name.npz")
    run("sample", "named", "--class", 3, "-n", 2, "--out", "number.npz")
    assert np.array_equal(np.load("name.npz")["images"], np.load("number.npz")["images"])
    assert ", class 3, fp32" in run("sample", models / "consistency", "--class", 3, "-n", 2)
    with pytest.raises(TcmError, match="labels='cow': none of the 10 classes has this name"):
        run("sample", "named", "--class", "cow", "-n", 2)


def test_sampling_options_that_cannot_be(models: Path) -> None:
    model = models / "truncated"
    for options, message in (
        (["--steps", 2, "--times", "10,1"], "give one"),
        (["--seeds", "0-3", "-n", 3], "give one"),
        (["--times", "10,0.5"], "is below 1"),
        (["--times", "1"], r"times\[0\]=1 is not T=10.0"),
        (["--class", 10], "between 0 and 9"),
        (["--out", "samples.gif"], "unknown ending"),
        (["--device", "abacus"], "not a device"),
        (["--seeds", "5-1"], "backwards"),
    ):
        with pytest.raises(TcmError, match=message):
            run("sample", model, *options)
    with pytest.raises(TcmError, match="nowhere"):
        run("sample", "./nowhere")


def test_images_that_cannot_be_measured(models: Path) -> None:
    shared = ["--data", "digits", "--detector", "digits"]
    Path("empty").mkdir()
    Path("text").mkdir()
    for number in range(3):
        Path(f"text/{number}.png").write_text("not a picture")
    Path("mixed").mkdir()
    Image.new("L", (8, 8)).save("mixed/a.png")
    Image.new("L", (9, 8)).save("mixed/b.png")
    Path("words.pt").write_text("not a network")
    np.savez("float.npz", images=np.full((5, 1, 8, 8), np.nan, np.float32))
    np.savez("large.npz", images=np.zeros((5, 3, 32, 32), np.uint8))
    for target, message in (("empty", "empty"), ("text", "0.png"), ("mixed", "b.png"), ("float.npz", "float32")):
        with pytest.raises(TcmError, match=message):
            run("eval", target, *shared)
    with pytest.raises(TcmError, match="do not fit the detector"):
        run("eval", "large.npz", "--data", "large.npz", "--detector", "digits")
    with pytest.raises(TcmError, match="not a TorchScript"):
        run("eval", "mixed", "--data", "digits", "--detector", "words.pt")
    with pytest.raises(TcmError, match="'fad' is unknown"):
        run("eval", "mixed", *shared, "--metrics", "fid,fad")
    with pytest.raises(TcmError, match="are for models"):
        run("eval", "float.npz", *shared, "--steps", 2)
    with pytest.raises(TcmError, match="needs a TARGET"):
        run("eval", "mixed")
    assert not Path("scores.jsonl").exists()


def test_shapes_that_cannot_be_compared(models: Path) -> None:
    """As `tcm train` refuses them; in Inception's features, any two have a distance."""
    np.savez("large.npz", images=np.zeros((5, 3, 32, 32), np.uint8))
    model, shared = models / "consistency", ["--detector", "digits", "-n", 70]
    for target, data, options, shapes in (
        ("large.npz", "digits", [], (r"\[3, 32, 32\]", r"digits.*\[1, 8, 8\]")),
        (model, "large.npz", shared, (r"\[1, 8, 8\]", r"large.npz.*\[3, 32, 32\]")),
        (model, "digits", [*shared, "--resize", 9], (r"\[1, 9, 9\]", r"digits.*\[1, 8, 8\]")),
    ):
        with pytest.raises(TcmError, match=f"{shapes[0]} cannot be compared with {shapes[1]}; .*--resize"):
            run("eval", target, "--data", data, *options)
    with pytest.raises(TcmError, match=r"cannot be compared with large\.npz"):
        run("times", model, "--data", "large.npz", *shared)


def test_a_run_s_own_data_and_scores_are_the_defaults(models: Path) -> None:
    """Where `tcm report` looks for them, whether the run is given, one of its stages or a model of theirs."""
    folder, options = a_run(models), ["--detector", "digits", "-n", 70]
    (folder / "recipe.toml").write_text(to_toml(resolve("digits")))
    for target in (folder, folder / "10-again", folder / "10-again" / "model", folder / "1-consistency"):
        run("eval", target, *options)
    scores = read_scores(folder / "scores.jsonl")
    assert [score.reference for score in scores] == ["digits"] * 4
    names = [*["a run/10-again/model"] * 3, "a run/1-consistency/model"]
    assert [score.subject for score in scores] == names
    (folder / "recipe.toml").write_text(to_toml(resolve("digits", ["data.path=gone/photos"])))
    for more in ([], ["--dfid", 1]):
        with pytest.raises(TcmError, match=r"a run was trained on gone/photos, .* --data"):
            run("eval", folder, *options, *more)
    run("eval", folder, *options, "--data", "digits", "--scores", "mine.jsonl")
    assert len(read_scores(Path("mine.jsonl"))) == 1
    assert len(read_scores(folder / "scores.jsonl")) == 4


def test_an_option_that_is_given_twice_counts_twice_or_is_refused(models: Path) -> None:
    model, shared = models / "consistency", ["--data", "digits", "--detector", "digits", "-n", 70]
    several = ["--steps", 1, "--steps", 2, "--metrics", "fid", "--metrics", "kid,is", "--dfid", 1, "--dfid", "2,5"]
    run("eval", model, *shared, *several)
    found = [(score.kind, score.sampling, score.t) for score in read_scores(Path("scores.jsonl"))]
    ways = ["times 10, fp32", "times 10, 1, fp32"]
    sampled = [(kind, way, None) for way in ways for kind in ("fid", "kid", "is")]
    assert found == [*sampled, *(("fid", None, t) for t in (1.0, 2.0, 5.0))]
    for command, *options in (("eval", *shared, "--seed", 0, "--seed", 1), ("sample", "--steps", 1, "--steps", 2)):
        with pytest.raises(TcmError, match=f"{options[-2]} is given 2 times"):
            run(command, model, *options)
    with pytest.raises(TcmError, match="give one"):
        run("eval", model, *shared, "--steps", 1, "--times", "10,1")


def test_few_images_get_a_note(models: Path) -> None:
    images, _ = open_dataset("digits").read(np.arange(30))
    np.savez("few.npz", images=images)
    assert "rank 29" in run("eval", "few.npz", "--data", "digits", "--detector", "digits").replace("\n", " ")


@pytest.mark.parametrize(
    "command", [("sample", "digits"), ("eval", "digits", "--data", "digits", "--detector", "digits", "-n", "20")]
)
def test_out_of_memory(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nProcess 1 has 14 GiB in use.")

    monkeypatch.setattr(DDPMpp, "forward", fail)
    with pytest.raises(TcmError, match=r"^out of memory \(CUDA out .* 2.00 GiB.\); use a smaller batch"):
        run(*command)

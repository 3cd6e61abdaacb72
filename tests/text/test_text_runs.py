"""A text-to-image run from captions to a report: trained, resumed, sampled, measured, shown."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from inprocess import train
from launching import fingerprint
from PIL import Image
from safetensors.torch import load_file, save_file
from tiny_text import save_clip, save_encoder, texts
from typer.testing import CliRunner

import tcm
from tcm.cli.main import app
from tcm.data import ArrayDataset, open_dataset
from tcm.data.arrays import save_npz
from tcm.data.captions import Captions
from tcm.data.dataset import ClassLabels
from tcm.evaluation.clip_score import load_clip
from tcm.evaluation.evaluate import evaluate_model
from tcm.evaluation.features import load_detector
from tcm.evaluation.generation import Sampling, conditions_of
from tcm.evaluation.prompts import prompted, read_prompts
from tcm.evaluation.references import chosen_images, reference_of
from tcm.evaluation.retrieval import retrieval_scores
from tcm.evaluation.scores import read_scores
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.recipes.resolve import resolve
from tcm.recipes.schema import DataSpec, Recipe
from tcm.weights import Model, inspect

COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}
THINGS = ("cat", "dog", "apple", "circle")
TOKENS = 5


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, a CLIP, and images of one colour each, whose captions name it."""
    folder = tmp_path_factory.mktemp("texts")
    save_encoder(folder / "bert")
    captions = [f"a {colour} {thing}" for colour in COLOURS for thing in THINGS] * 2
    images = np.stack(
        [np.tile(np.array(COLOURS[text.split()[1]], np.uint8)[:, None, None], (8, 8)) for text in captions]
    )
    classes = ClassLabels.of([list(COLOURS).index(text.split()[1]) for text in captions], "here", list(COLOURS))
    data = ArrayDataset(images, Captions(captions, classes))
    save_npz(folder / "data.npz", {"train": data, "test": data})
    return folder


def make_recipe(home: Path, *overrides: str, encoder_hash: str = "") -> Recipe:
    kind = texts(home / "bert", TOKENS)
    fields = f"encoder='{kind.encoder}', encoder_hash='{encoder_hash}', width=16, tokens={TOKENS}, "
    fields += "prompts=['a red cat', 'the blue dog']"
    network = "channels=8, channel_mult=[1, 2], patch=2, attention=[], cross_attention=[4, 2], heads=2, dropout=0.1"
    words = ["steps=4", "batch=8", "log_every=2", "checkpoint_every=2", "sample_every=0", "precision=fp32"]
    return resolve(
        "emoji-text",
        [
            *("image_shape=[3,8,8]", f"data.path={home / 'data.npz'}", "t_max=10.0"),
            *(f"condition={{kind='text', {fields}}}", f"network={{kind='text_unet', {network}}}"),
            *(f"*.{word}" for word in words),
            *("diffusion.warmup=1", "consistency.curriculum.d=2", "consistency.watched_images=0"),
            "diffusion.label_dropout=0.5",
            *overrides,
        ],
    )


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    train(make_recipe(home), home / "run")
    return home / "run"


def test_a_stopped_run_ends_with_the_same_bits(home: Path, run: Path) -> None:
    """As if it had been killed after the second step of stage 0."""
    other = shutil.copytree(run, home / "other")
    for left in (other / "1-consistency", other / "2-truncated", other / "0-diffusion" / "model"):
        shutil.rmtree(left)
    shutil.rmtree(other / "0-diffusion" / "state" / "step-4")
    assert "resuming from step 2" in train(make_recipe(home), other)
    assert fingerprint(other) == fingerprint(run)


def test_the_card_names_the_encoder(home: Path, run: Path) -> None:
    card = inspect(run / "2-truncated" / "model")
    assert card.condition == texts(home / "bert", TOKENS)
    assert isinstance(card.condition, tcm.Texts)
    assert card.condition.prompts == ("a red cat", "the blue dog")


def test_another_encoder_is_refused(home: Path, run: Path) -> None:
    other = texts(save_encoder(home / "another", seed=1), TOKENS)
    wrong = make_recipe(home, encoder_hash=other.encoder_hash)
    with pytest.raises(TcmError, match=r"the text encoder .* has hash .*, but the model or the recipe expects"):
        train(wrong, home / "refused")
    with pytest.raises(TcmError, match=r"data.path=digits has 10 classes, but condition is texts by"):
        train(make_recipe(home).model_copy(update={"data": DataSpec(path="digits", channels=3)}), home / "refused")


def test_prompts_in_python(run: Path) -> None:
    model = Model.load(run / "2-truncated" / "model")
    three = model.sample(prompts=["a red cat", "a blue dog", "a red cat"], seeds=[5, 5, 6])
    assert three.shape == (3, 3, 8, 8)
    assert not torch.allclose(three[0], three[1])
    alone = model.sample(prompts="a blue dog", seed=5)
    torch.testing.assert_close(alone[0], three[1], atol=1e-4, rtol=1e-4)
    assert model.sample(2, prompts="a cat").shape == (2, 3, 8, 8)
    assert len(model.sample(prompts=["a", "the", "cat"])) == 3
    with pytest.raises(TcmError, match="labels=3 and prompts=a cannot both be given; give one of them"):
        model.sample(1, labels=3, prompts="a")
    with pytest.raises(TcmError, match="negative='a dog' has no effect on a consistency model that is sampled without"):
        model.sample(prompts="a cat", negative="a dog")
    with pytest.raises(TcmError, match=r"guidance=4: a consistency model is not guided while it is sampled"):
        model.guided(4)
    with pytest.raises(TcmError, match="negative='x' is for models that take texts, but this one takes 10 classes"):
        tcm.load("digits").sample(1, negative="x")


def test_a_diffusion_model_is_guided(run: Path) -> None:
    """D + w (D(c) − D(∅)), where ∅ is the negative prompt."""
    model = Model.load(run / "0-diffusion" / "model")
    guided = model.guided(3.0)
    assert guided.sampler.describe(guided.denoiser, 2, None) == "Heun, 2 steps, 6 evaluations, guidance 3"
    plain, cat = model.sample(prompts="a cat", steps=2), guided.sample(prompts="a cat", steps=2)
    assert not torch.allclose(plain, cat)
    assert not torch.allclose(cat, guided.sample(prompts="a cat", steps=2, negative="a red dog"))
    # A text against itself: guidance has nothing to add.
    torch.testing.assert_close(guided.sample(prompts="a cat", steps=2, negative="a cat"), plain, atol=1e-4, rtol=1e-4)


def invoke(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_prompts_on_the_command_line(run: Path, tmp_path: Path) -> None:
    model = run / "2-truncated" / "model"
    (tmp_path / "prompts.txt").write_text("a blue dog\n\nthe white apple\n")
    words = ["sample", model, "--prompt", "a red cat", "--prompts", tmp_path / "prompts.txt", "-n", 2, "--seed", 7]
    invoke(*words, "--out", tmp_path / "grid.png")
    invoke(*words, "--out", tmp_path / "a.npz")
    invoke(*words, "--out", tmp_path / "folder", "--batch", 1)
    arrays = np.load(tmp_path / "a.npz")
    assert arrays["prompts"].tolist() == ["a red cat"] * 2 + ["a blue dog"] * 2 + ["the white apple"] * 2
    assert arrays["seeds"].tolist() == [7, 8] * 3
    files = sorted(str(file.relative_to(tmp_path / "folder")) for file in (tmp_path / "folder").rglob("*.png"))
    assert files[:3] == ["00-a-red-cat/000007.png", "00-a-red-cat/000008.png", "01-a-blue-dog/000007.png"]
    for file, pixels in zip(files, arrays["images"], strict=True):
        one_by_one = np.asarray(Image.open(tmp_path / "folder" / file)).transpose(2, 0, 1).astype(int)
        assert np.abs(one_by_one - pixels).max() <= 1, "the batch changes nothing but rounding"
    grid = Image.open(tmp_path / "grid.png")
    assert grid.height > 3 * grid.width // 2, "three rows of two, with their prompts below"


def test_wrong_prompts(run: Path, tmp_path: Path) -> None:
    model = run / "2-truncated" / "model"
    with pytest.raises(TcmError, match=r"prompts.txt cannot be read as prompts .*; give a text file with one prompt"):
        invoke("sample", model, "--prompts", tmp_path / "prompts.txt")
    with pytest.raises(TcmError, match=r"--negative 'a' needs a prompt; give --prompt or --prompts"):
        invoke("sample", model, "--negative", "a", "--out", tmp_path / "x.png")
    with pytest.raises(TcmError, match=r"--class 3 and prompts cannot both be given; give one of them"):
        invoke("sample", model, "--prompt", "a", "--class", "3")
    with pytest.raises(TcmError, match=r"prompts='a cat' given, but this model takes 10 classes; leave prompts out"):
        tcm.load("digits").sample(prompts="a cat")


def test_files_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(["a cat", " a  dog "]))
    (tmp_path / "coco.json").write_text(json.dumps({"images": [], "annotations": [{"id": 1, "caption": "a cat"}]}))
    assert read_prompts(tmp_path / "list.json") == ["a cat", "a dog"]
    assert read_prompts(tmp_path / "coco.json") == ["a cat"]
    for wrong in ("[]", '{"annotations": [{}]}', "3", "[1]"):
        (tmp_path / "wrong.json").write_text(wrong)
        with pytest.raises(TcmError, match=r"wrong.json holds no prompts; write one per line"):
            read_prompts(tmp_path / "wrong.json")
    assert [one.folder for one in prompted(["A cat!", "A cat!"], [0])] == ["00-a-cat", "01-a-cat"]


def detector(home: Path) -> str:
    """Features that are the mean colours, as a TorchScript file."""

    class Means(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(2).mean(2)

    torch.jit.script(Means()).save(home / "means.pt")
    return str(home / "means.pt")


def test_prompts_are_measured(home: Path, run: Path) -> None:
    model, scores = run / "2-truncated" / "model", home / "scores.jsonl"
    clip = save_clip(home / "clip")
    prompts = ["a red cat", "a blue dog", "the white apple", "a green circle"]
    (home / "coco.json").write_text(json.dumps({"annotations": [{"caption": text} for text in prompts]}))
    np.savez(home / "large.npz", images=np.random.default_rng(0).integers(0, 256, (9, 3, 16, 16), np.uint8))
    words = ["eval", model, "--prompts", home / "coco.json", "--detector", detector(home), "--scores", scores, "-n", 4]
    invoke(*words, "--data", home / "data.npz", "--retrieval")
    invoke(*words, "--data", home / "large.npz", "--clip", clip, "--resize", 16)
    found = {score.kind: score for score in read_scores(scores)}
    assert found["fid"].conditions == "given"
    assert "4 prompts of coco.json" in str(found["fid"].sampling)
    assert str(found["fid"].sampling).endswith("resized to 16×16 (Lanczos)")
    assert set(found) == {"fid", "clip-score", "retrieval", "class-retrieval"}
    # The CLIP score of the same images, resized in the same way, by transformers itself.
    from transformers import CLIPImageProcessor, CLIPModel

    drawn = tcm.data.to_uint8(tcm.load(model).sample(seeds=range(4), prompts=prompts))
    pictures = [
        Image.fromarray(one.permute(1, 2, 0).numpy()).resize((16, 16), Image.Resampling.LANCZOS) for one in drawn
    ]
    network, tokenizer = CLIPModel.from_pretrained(clip), load_clip(str(clip), torch.device("cpu")).tokenizer
    with torch.no_grad():
        pixels = CLIPImageProcessor.from_pretrained(clip)(images=pictures, return_tensors="pt")
        out = network(**pixels, **tokenizer(prompts, padding=True, return_tensors="pt"))
    truth = (100 * out.logits_per_image.diag() / network.logit_scale.exp()).clamp_min(0).mean()
    assert found["clip-score"].value == pytest.approx(float(truth.detach()), abs=0.05)


def test_an_incomplete_clip_gives_no_score(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a vocabulary or some of the weights, transformers would make them up; a whole one loads quietly."""
    folder, device = save_clip(tmp_path / "clip"), torch.device("cpu")
    capfd.readouterr()
    load_clip(str(folder), device)
    assert capfd.readouterr().err == ""
    weights = load_file(folder / "model.safetensors")
    without = {name: tensor for name, tensor in weights.items() if name != "visual_projection.weight"}
    save_file(without, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TcmError, match=r"clip holds no CLIP model .*its weights lack visual_projection.weight"):
        load_clip(str(folder), device)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        TcmError, match=r"clip holds no CLIP model that can be loaded \(no vocabulary\); check the folder"
    ):
        load_clip(str(folder), device)


def test_texts_are_not_measured_without_prompts(home: Path, run: Path, tmp_path: Path) -> None:
    """The model's own few prompts are not those of the data; a prompt for all images is a choice, and allowed."""
    words = [run / "2-truncated" / "model", "--data", home / "data.npz", "--detector", detector(home), "-n", 4]
    remedy = "give --prompts FILE, or --data-conditions for the data's own captions"
    with pytest.raises(TcmError, match=f"the model takes texts, and its own 2 prompts are not those .*; {remedy}"):
        invoke("eval", *words)
    with pytest.raises(
        TcmError, match=r"the model takes texts, .*; give --data-conditions for the data's own captions"
    ):
        invoke("times", *words)
    assert "best second time" in invoke("times", *words, "--grid", "1,2", "--data-conditions")
    (tmp_path / "three.txt").write_text("a red cat\na blue dog\nthe white apple\n")
    invoke("eval", *words, "--class", "a red cat", "--scores", tmp_path / "one.jsonl")
    invoke("eval", *words[:-1], 2, "--prompts", tmp_path / "three.txt", "--scores", tmp_path / "two.jsonl")
    assert "first 2 of 3 prompts of three.txt" in str(read_scores(tmp_path / "two.jsonl")[0].sampling)


def test_sampling_says_which_prompts_are_drawn(run: Path, tmp_path: Path) -> None:
    words = ["sample", run / "2-truncated" / "model", "-n", 1, "--out", tmp_path / "x.png"]
    own = "without --prompt or --prompts, each image uses one of the model's own prompts: 'a red cat', 'the blue dog'"
    assert own in invoke(*words)
    assert "without --prompt" not in invoke(*words, "--prompt", "a cat")
    model = Model.load(run / "2-truncated" / "model")
    bare = replace(model.card.condition, prompts=())
    replace(model, card=model.card.model_copy(update={"condition": bare})).save(tmp_path / "bare")
    words[1] = tmp_path / "bare"
    assert "without --prompt or --prompts, all images use the empty prompt" in invoke(*words)


def test_eval_warns_once_of_all_prompts_that_are_cut(home: Path, run: Path) -> None:
    long = ["a red cat on the big white square with a small black dog", "a blue dog on the big green square with a cat"]
    (home / "long.txt").write_text("\n".join(long * 2))
    words = ["eval", run / "2-truncated" / "model", "--prompts", home / "long.txt", "--data", home / "data.npz"]
    with pytest.warns(TcmWarning) as given:
        invoke(*words, "--detector", detector(home), "--scores", home / "cut.jsonl", "-n", 4, "--batch", 1)
    (cut,) = [str(one.message) for one in given if "longer than the" in str(one.message)]
    assert "(another prompt is cut too)" in cut


def test_the_captions_of_the_data_are_conditions(home: Path, run: Path) -> None:
    model = Model.load(run / "2-truncated" / "model")
    dataset = open_dataset(home / "data.npz", expected=model.card.condition)
    reference = reference_of(dataset, "data", load_detector(detector(home)), keep=True)
    (score,) = evaluate_model(model, "m", range(8), Sampling(steps=1), reference, condition=conditions_of(dataset))
    assert score.conditions == "given"


class Perfect(Model):
    """Draws the colour in its prompt."""

    def sample(self, *arguments: object, **options: object) -> torch.Tensor:  # type: ignore[override]
        prompts = options["prompts"]
        assert isinstance(prompts, list)
        colours = torch.tensor([COLOURS[prompt.split()[1]] for prompt in prompts])
        return (colours / 127.5 - 1)[:, :, None, None].expand(-1, -1, 8, 8)


def test_retrieval_knows_the_right_image(home: Path, run: Path) -> None:
    """The class always and, as four captions share each, the caption of the first of them."""
    plain = Model.load(run / "2-truncated" / "model")
    dataset = open_dataset(home / "data.npz")
    reference = reference_of(dataset, "data", load_detector(detector(home)), keep=True)
    caption, category = retrieval_scores(Perfect(plain.denoiser, plain.card), "m", dataset, reference, Sampling())
    assert (category.value, category.metric) == (1.0, "class of the nearest image")
    assert caption.value == pytest.approx(1 / 4)
    with pytest.raises(TcmError, match="digits has no captions, which retrieval needs; use captioned data"):
        retrieval_scores(plain, "m", open_dataset("digits"), replace(reference, name="digits"), Sampling())


def test_the_results_of_the_example_are_of_captions_from_all_over_the_data(home: Path, run: Path) -> None:
    """A model that draws the caption's colour is always right about it, also for some of the captions; of these, no
    colour has more than its share, though the data are sorted by it."""
    path = Path(__file__).parents[2] / "examples" / "emoji_text_results.py"
    spec = importlib.util.spec_from_file_location("emoji_text_results", path)
    example = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, example)
        spec.loader.exec_module(example)
        plain = Model.load(run / "2-truncated" / "model")
        way = example.Way("perfect", Perfect(plain.denoiser, plain.card), 1)
        data = open_dataset(home / "data.npz")
        for count, captions in ((None, 32), (16, 16)):
            cells = example.row(way, data, data, load_detector(detector(home)), count).split("|")
            assert [cells[4].strip(), cells[6].strip()] == ["100%", "100%"]
            assert sum(len(some) for some in example.drawn_captions(way, data, chosen_images(32, count))) == captions
    assert example.guessing(data, data, None) == "25% by chance, 25% by always naming red"
    shares = np.bincount(example.classes(data)[chosen_images(32, 8)], minlength=4)
    assert shares.max() < 8


def test_the_report_shows_the_prompts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    invoke("report", run)
    page = (run / "report.html").read_text("utf-8")
    assert "From left to right: a red cat; the blue dog" in page
    assert "Heun, guidance 2" in page
    assert "nearest by pixels" in page


PAGE = Path(__file__).parents[2] / "docs" / "text-to-image.md"
BLOCKS = re.findall(r"```(sh|python|toml)\n(.*?)```", PAGE.read_text("utf-8"), flags=re.S)
ONLY_PARSED = ("tcm data", "tcm text", "tcm train", "tcm eval", "tcm report")
"""What needs the network or hours: with --help, which parses every option and stops."""


def test_the_page_does_what_it_says(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(run, tmp_path / "runs" / "emoji-text")
    monkeypatch.chdir(tmp_path)
    commands = [line.split("  #")[0].strip() for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    assert {command.split()[1] for command in commands} == {"data", "text", "train", "sample", "report", "eval"}
    for command in commands:
        words = shlex.split(command)[1:]
        invoke(*words, *(["--help"] if command.startswith(ONLY_PARSED) else ["-n", "1", "--overwrite"]))
    for kind, text in BLOCKS:
        if kind == "python":
            exec(text, {})
        if kind == "toml":
            tcm.Texts(**tomllib.loads(text)["condition"])


def test_the_page_links_to_what_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", PAGE.read_text("utf-8"))
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []

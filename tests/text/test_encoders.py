"""Frozen encoders: real transformers models, built here from their configs."""

import io
import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tiny_text import LONGEST, WORDS, save_clip, save_encoder, save_tokenizer, texts

from tcm.evaluation.clip_score import load_clip
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.method.conditions import Labels, TextEmbeddings
from tcm.text.condition import UNREAD, Texts
from tcm.text.encoders import AT_ONCE, load_encoder
from tcm.text.fetch import fetch_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_encoder(tmp_path_factory.mktemp("encoders") / "bert")


def test_it_gives_what_transformers_gives(folder: Path) -> None:
    from transformers import AutoModel, AutoTokenizer

    found = load_encoder(str(folder)).encode(["a red apple", "the cat"])
    words = AutoTokenizer.from_pretrained(folder)(["a red apple", "the cat", ""], padding=True, return_tensors="pt")
    with torch.no_grad():
        truth = AutoModel.from_pretrained(folder)(**words).last_hidden_state
    for row, length in enumerate(words["attention_mask"].sum(1).tolist()):
        tokens, mask = (found.tokens, found.mask) if row < 2 else (found.null_tokens[None], found.null_mask[None])
        torch.testing.assert_close(tokens[row % 2][:length], truth[row, :length], atol=1e-5, rtol=1e-5)
        assert mask[row % 2].sum() == length
    assert found.texts == ("a red apple", "the cat")
    assert found.tokens.shape == (2, LONGEST, 16)


def test_it_is_loaded_once_and_never_trained(folder: Path) -> None:
    encoder = load_encoder(str(folder))
    assert load_encoder(str(folder)) is encoder
    assert not any(parameter.requires_grad for parameter in encoder.model.parameters())


def test_many_texts_are_encoded_a_few_at_a_time(folder: Path) -> None:
    encoder, sizes = load_encoder(str(folder)), []
    hook = encoder.model.register_forward_pre_hook(
        lambda module, args, options: sizes.append(len(options["input_ids"])), with_kwargs=True
    )
    many = [f"a {first} {second}" for first in WORDS for second in WORDS]
    try:
        found = encoder.encode(many)
    finally:
        hook.remove()
    assert max(sizes) <= AT_ONCE < len(many)
    assert found.texts == tuple(many)
    for number in (0, AT_ONCE - 1, AT_ONCE, len(many) - 1):
        alone = encoder.encode(many[number : number + 1])
        assert torch.equal(found.mask[number], alone.mask[0])
        torch.testing.assert_close(found.tokens[number], alone.tokens[0])
        torch.testing.assert_close(found.null_tokens, alone.null_tokens)


def test_its_hash_is_that_of_weights_and_vocabulary(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    other = save_encoder(tmp_path / "other", seed=1)
    hashes = [load_encoder(str(path)).sha256 for path in (folder, copy, other)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_a_long_prompt_is_cut_with_a_warning_that_says_where(folder: Path) -> None:
    prompt = "a red apple on the big white square with a small black cat on it"
    with pytest.warns(
        TcmWarning, match=r"longer than the 8 tokens .* what follows 'a red apple on the big' has no eff"
    ):
        cut = load_encoder(str(folder)).encode([prompt], 8)
    same = load_encoder(str(folder)).encode(["a red apple on the big"], 8)
    torch.testing.assert_close(cut.tokens, same.tokens, atol=1e-6, rtol=1e-6)


def test_clip_counts_its_padding_as_stable_diffusion_does(tmp_path: Path) -> None:
    from transformers import CLIPTextModel

    folder = save_clip(tmp_path / "clip")
    found = load_encoder(str(folder)).encode(["a red apple"])
    assert bool(found.mask.all())
    ids = torch.tensor([[2, 4, 6, 11, 3, *[0] * (LONGEST - 5)]])
    with torch.no_grad():
        truth = CLIPTextModel.from_pretrained(folder)(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found.tokens, truth, atol=1e-5, rtol=1e-5)


def test_a_pipeline_has_its_parts_in_folders(folder: Path, tmp_path: Path) -> None:
    pipeline = tmp_path / "pipeline"
    shutil.copytree(folder, pipeline / "text_encoder")
    for file in (pipeline / "text_encoder").glob("token*"):
        file.unlink()
    with pytest.raises(
        TcmError, match="has a folder text_encoder, but no tokenizer; copy that folder from the pipeline too"
    ):
        load_encoder(str(pipeline))
    save_tokenizer(pipeline / "tokenizer")
    assert load_encoder(str(pipeline)).sha256 == load_encoder(str(folder)).sha256


def test_what_is_missing_is_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_tokenizer = shutil.copytree(folder, tmp_path / "a", ignore=shutil.ignore_patterns("token*", "special*"))
    with pytest.raises(TcmError, match=r"a has no tokenizer that can be loaded .*; add its files, such as tokenizer"):
        load_encoder(str(without_tokenizer))
    without_weights = shutil.copytree(folder, tmp_path / "b", ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(TcmError, match=r"b has no text encoder that can be loaded"):
        load_encoder(str(without_weights))
    with pytest.raises(TcmError, match="/nowhere is not a folder with a text encoder; give such a folder, a hub id"):
        load_encoder("/nowhere")
    monkeypatch.setenv("TCM_DATA", str(tmp_path))
    load_encoder.cache_clear()
    with pytest.raises(TcmError, match="minilm is not on this machine yet; run `tcm text fetch minilm`"):
        load_encoder("minilm")
    with pytest.raises(TcmError, match="no text encoder called 't5' to fetch; choose one of: minilm"):
        fetch_encoder("t5")
    with pytest.raises(TcmError, match="the captions need a text encoder; name one in the recipe"):
        UNREAD.load_encoder()


def test_the_kind_knows_its_encoder(folder: Path, tmp_path: Path) -> None:
    kind = texts(folder, 6)
    assert str(kind) == f"texts by {folder} ({kind.encoder_hash[:8]}), 6 tokens of width 16"
    other = save_encoder(tmp_path / "other", seed=1)
    with pytest.raises(
        TcmError, match=r"has hash .* but the model or the recipe expects .*; give the folder of that encoder"
    ):
        Texts(str(other), 16, 6, kind.encoder_hash).encode(["a"])
    with pytest.raises(
        TcmError, match=r"gives up to 12 tokens of width 16, but condition asks for 6 of width 8; correct"
    ):
        Texts(str(folder), 8, 6).encode(["a"])


def test_a_recipe_settles_what_it_leaves_open(folder: Path) -> None:
    kind = texts(folder, 6)
    asked = Texts("elsewhere", 16, 6, prompts=("a cat",))
    settled = asked.settle(kind)
    assert settled is not None
    assert (settled.encoder, settled.encoder_hash, settled.prompts) == ("elsewhere", kind.encoder_hash, ("a cat",))
    assert Texts("elsewhere", 16, 6, "0" * 64).settle(kind) is None
    assert Texts("elsewhere", 16, 7).settle(kind) is None


def test_prompts_are_chosen_drawn_and_spread(folder: Path) -> None:
    kind = Texts.of(load_encoder(str(folder)), 6, ["a cat", "a dog", "the apple"])
    assert kind.choose("a cat", 2).texts == ("a cat", "a cat")
    assert kind.choose(["a cat", "a dog"], 2).texts == ("a cat", "a dog")
    assert kind.captions(kind.spread(4)) == ["a cat", "a dog", "the apple", "a cat"]
    assert len(kind.examples(8)) == 3
    drawn = kind.draw(range(40))
    assert set(drawn.texts) == set(kind.prompts)
    assert kind.draw([5, 7]).texts == tuple(drawn.texts[seed] for seed in (5, 7))
    assert kind.takes(drawn)
    assert not kind.takes(Labels(torch.zeros(1, dtype=torch.long)))
    assert kind.takes(kind.dummy(3))
    with pytest.raises(TcmError, match="prompts has 2 texts for 3 images; give one per image, or one for all"):
        kind.choose(["a", "the"], 3)
    with pytest.raises(TcmError, match=r"prompts=3 must be texts"):
        kind.choose(3, 1)


def test_null_and_negative(folder: Path) -> None:
    kind = texts(folder, 6)
    two = kind.encode(["a cat", "a dog"])
    kept = two.keep(torch.tensor([True, False]))
    assert kept.texts == ("a cat", "")
    torch.testing.assert_close(kept.tokens[1], kind.encode([""]).tokens[0], atol=1e-6, rtol=1e-6)
    against = kind.with_negative(two, "the apple")
    assert isinstance(against, TextEmbeddings)
    torch.testing.assert_close(against.null().tokens[1], kind.encode(["the apple"]).tokens[0], atol=1e-6, rtol=1e-6)
    assert two.select(torch.tensor([1])).texts == ("a dog",)
    assert two.select(slice(0, 1)).texts == ("a cat",)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_code_in_a_folder_is_not_run(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked whether it should be, even if they would say yes."""
    folder = save_clip(tmp_path / "clip")
    sprung, classes = tmp_path / "sprung", ("AutoConfig", "AutoModelForTextEncoding", "AutoImageProcessor")
    (folder / "own.py").write_text(f"open({str(sprung)!r}, 'w').close()\nclass Own: ...\n")
    config = json.loads((folder / file).read_text())
    config |= {"auto_map": dict.fromkeys(classes, "own.Own") | {"AutoTokenizer": [None, "own.Own"]}}
    config |= (
        {"model_type": "own"} if file == "config.json" else {"image_processor_type": "Own", "tokenizer_class": "Own"}
    )
    (folder / file).write_text(json.dumps(config))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    for load in (load_encoder, lambda path: load_clip(path, torch.device("cpu"))):
        with suppress(TcmError):
            load(str(folder))
    assert not sprung.exists()
    assert sys.stdin.read() == "y\n" * 9

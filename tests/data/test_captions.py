"""Captioned images: every form of file gives the same texts, and a stream what a data set gives."""

import csv
import io
import json
import tarfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_text import save_encoder, texts, write_images

from tcm.data import ArrayDataset, StreamBatches, open_data, open_dataset, summarize
from tcm.data.arrays import save_npz
from tcm.data.caption_streams import CaptionStream, embedding_bytes, embedding_of
from tcm.data.captions import Captions, EncodedCaptions
from tcm.data.dataset import ClassLabels
from tcm.data.decode import BrokenImage
from tcm.data.emoji import emoji_splits, is_held_out
from tcm.data.huggingface import encoded_bytes
from tcm.data.opening import open_pictures
from tcm.data.prepare import Crop, Form, Preparation, prepare_dataset, prepared_images, write_prepared
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.method.conditions import Classes, TextEmbeddings
from tcm.text.condition import UNREAD, Texts

CAPTIONS = [f"a {size} {colour} {thing}" for size in ("big", "small") for colour in ("red", "blue", "black")
            for thing in ("cat", "dog", "apple", "circle")]  # fmt: skip


@pytest.fixture(scope="module")
def kind(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    return texts(save_encoder(tmp_path_factory.mktemp("encoder") / "bert"), 6)


def write_folder(folder: Path, captions: Sequence[str] = CAPTIONS) -> list[str]:
    names = write_images(folder, len(captions))
    lines = [json.dumps({"file_name": name, "text": text}) for name, text in zip(names, captions, strict=True)]
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return names


def write_shards(folder: Path, files: Sequence[dict[str, bytes]], shards: int = 3) -> Path:
    """WebDataset shards with these files of each sample, by their endings."""
    folder.mkdir()
    for shard in range(shards):
        with tarfile.open(folder / f"{shard:05d}.tar", "w") as archive:
            for index in range(shard, len(files), shards):
                for suffix, data in files[index].items():
                    entry = tarfile.TarInfo(f"{index:06d}.{suffix}")
                    entry.size = len(data)
                    archive.addfile(entry, io.BytesIO(data))
    return folder


def png(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "png")
    return file.getvalue()


def samples(captions: Sequence[str] = CAPTIONS) -> list[dict[str, bytes]]:
    return [{"png": png(index * 7), "txt": text.encode()} for index, text in enumerate(captions)]


def value_of(image: torch.Tensor) -> int:
    return int(image.flatten()[0])


def test_files_of_captions(tmp_path: Path) -> None:
    names = write_folder(tmp_path / "jsonl")
    write_images(tmp_path / "csv", len(CAPTIONS))
    with (tmp_path / "csv" / "captions.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "caption"), *zip(names, CAPTIONS, strict=True)])
    for form in ("jsonl", "csv"):
        dataset = open_dataset(tmp_path / form)
        assert list(dataset.captions or ()) == CAPTIONS
        assert dataset.condition_kind == UNREAD
        assert summarize(dataset).captions == len(CAPTIONS)
        with pytest.raises(TcmError, match="the captions need a text encoder"):
            dataset.read(np.arange(2))


def test_broken_images_among_captions_are_left_out_up_to_a_limit(tmp_path: Path) -> None:
    names = write_folder(tmp_path)
    (tmp_path / names[0]).write_bytes(b"broken")
    (tmp_path / names[5]).write_bytes(b"")
    with pytest.warns(TcmWarning, match=rf"left out 2 of 24 images: {names[0]}, {names[5]}"):
        dataset = open_dataset(tmp_path)
    assert [broken.name for broken in dataset.skipped] == [names[0], names[5]]
    assert list(dataset.captions or ()) == [text for index, text in enumerate(CAPTIONS) if index not in (0, 5)]
    (tmp_path / names[9]).write_bytes(b"broken")
    with pytest.raises(
        TcmError, match=rf"3 of 24 images cannot be read, such as {names[0]}; at most 10% may be left out"
    ):
        open_dataset(tmp_path)


def test_files_that_do_not_match(tmp_path: Path) -> None:
    names = write_folder(tmp_path)
    file = tmp_path / "metadata.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, json.dumps({"file_name": "absent.png", "text": "a"})]))
    with pytest.raises(TcmError, match=r"metadata.jsonl names 1 files that do not exist, such as absent.png"):
        open_dataset(tmp_path)
    file.write_text("\n".join(lines[1:]))
    with pytest.warns(
        TcmWarning, match=rf"has no caption for 1 of 24 images, such as {names[0]}; they count as images"
    ):
        assert next(iter(open_dataset(tmp_path).captions or ())) == ""
    file.write_text("\n".join(lines[12:]))
    with pytest.raises(TcmError, match=r"has no caption for 12 of 24 images, such as 000.png; add them or remove"):
        open_dataset(tmp_path)
    for wrong in ('{"file_name": "000.png"}', "[1, 2]", "{", ""):
        file.write_text(wrong)
        with pytest.raises(TcmError, match=r"metadata.jsonl (needs lines such as|is not a file with one JSON object)"):
            open_dataset(tmp_path)


def test_captions_come_along_with_their_images(tmp_path: Path, kind: Texts) -> None:
    """Into a zip, into shards, into an .npz; the classes too."""
    write_folder(tmp_path / "folder")
    classes = ClassLabels.of([index % 3 for index in range(24)], "here", ["x", "y", "z"])
    pixels = open_dataset(tmp_path / "folder").pixels(np.arange(24))
    both = ArrayDataset(pixels, Captions(CAPTIONS, classes))
    save_npz(tmp_path / "both.npz", {"train": both, "test": both})
    prepare_dataset(both, tmp_path / "both.zip", Form((8, 8), Crop.CENTER))
    prepare_dataset(open_pictures(tmp_path / "folder"), tmp_path / "shards", Form((8, 8), Crop.CENTER))
    for name in ("both.npz", "both.zip", "shards"):
        found = open_dataset(tmp_path / name)
        assert list(found.captions or ()) == CAPTIONS
        assert found.condition_kind == (UNREAD if name == "shards" else Classes(3))
        read = open_dataset(tmp_path / name, expected=kind)
        assert read.condition_kind == kind
        images, condition = read.read(np.array([5, 3]))
        assert isinstance(condition, TextEmbeddings)
        truth = kind.encode([CAPTIONS[5], CAPTIONS[3]])
        torch.testing.assert_close(condition.tokens.float(), truth.tokens, atol=2e-3, rtol=2e-3)
        assert torch.equal(condition.mask, truth.mask)
        assert images[:, 0, 0, 0].tolist() == [35, 21]
    with pytest.raises(TcmError, match="only shards hold the embeddings of captions; name a folder"):
        write_prepared(tmp_path / "c.zip", [], both.annotations, kind)


def test_the_content_depends_on_captions_and_encoder(tmp_path: Path, kind: Texts) -> None:
    pixels = np.zeros((3, 3, 8, 8), np.uint8)
    other = texts(save_encoder(tmp_path / "other", seed=1), 6)
    made = [
        ArrayDataset(pixels, Captions(["a", "b", "c"])),
        ArrayDataset(pixels, Captions(["a", "b", "d"])),
        ArrayDataset(pixels, EncodedCaptions(Captions(["a", "b", "c"]), kind)),
        ArrayDataset(pixels, EncodedCaptions(Captions(["a", "b", "c"]), other)),
    ]
    assert len({dataset.content_hash() for dataset in made}) == 4


def test_a_stream_of_captions_resumes_exactly(tmp_path: Path, kind: Texts) -> None:
    """LAION's layout: some captions in .txt, others in .json."""
    files = samples()
    for sample in files[::2]:
        sample["json"] = json.dumps({"caption": sample.pop("txt").decode(), "width": 8}).encode()
    write_shards(tmp_path / "shards", files)
    stream = open_data(f"stream:{tmp_path / 'shards'}", expected=kind)
    assert isinstance(stream, CaptionStream)
    assert stream.condition_kind == kind
    assert set(stream.condition_kind.prompts) <= set(CAPTIONS)
    batches = list(islice(StreamBatches(stream, seed=0, batch=7).starting_at(0), 8))
    seen = set()
    for loaded in batches:
        assert isinstance(loaded.condition, TextEmbeddings)
        numbers = [value_of(image) // 7 for image in loaded.images]
        seen |= set(numbers)
        truth = kind.encode([CAPTIONS[number] for number in numbers])
        torch.testing.assert_close(loaded.condition.tokens.float(), truth.tokens, atol=2e-3, rtol=2e-3)
    assert seen == set(range(24))
    again = StreamBatches(stream, seed=0, batch=7).starting_at(5, batches[4].resume)
    for loaded, truth in zip(islice(again, 3), batches[5:], strict=True):
        assert torch.equal(loaded.images, truth.images)
        assert isinstance(loaded.condition, TextEmbeddings)
        assert isinstance(truth.condition, TextEmbeddings)
        assert torch.equal(loaded.condition.tokens, truth.condition.tokens)


def test_embeddings_ahead_are_those_on_the_fly(tmp_path: Path, kind: Texts) -> None:
    write_folder(tmp_path / "folder")
    preparation = Preparation(open_pictures(tmp_path / "folder"), Form((8, 8), Crop.CENTER))
    write_prepared(tmp_path / "ahead", prepared_images(preparation), preparation.annotations, kind)
    stored = json.loads((tmp_path / "ahead" / "dataset.json").read_text())["text"]
    assert (stored["encoder_hash"], stored["tokens"]) == (kind.encoder_hash, 6)
    prepare_dataset(open_pictures(tmp_path / "folder"), tmp_path / "plain", Form((8, 8), Crop.CENTER))
    found = []
    for name in ("ahead", "plain"):
        stream = open_data(f"stream:{tmp_path / name}", expected=kind)
        assert isinstance(stream, CaptionStream)
        assert stream.uses_stored == (name == "ahead")
        found.append(next(iter(StreamBatches(stream, seed=0, batch=8).starting_at(0))))
    assert torch.equal(found[0].images, found[1].images)
    one, two = found[0].condition, found[1].condition
    assert isinstance(one, TextEmbeddings)
    assert isinstance(two, TextEmbeddings)
    assert torch.equal(one.mask, two.mask)
    counted = one.mask[..., None]
    torch.testing.assert_close(one.tokens * counted, two.tokens * counted, atol=2e-3, rtol=2e-3)
    other = texts(save_encoder(tmp_path / "other", seed=1), 6)
    stream = open_data(f"stream:{tmp_path / 'ahead'}", expected=other)
    assert isinstance(stream, CaptionStream)
    assert not stream.uses_stored


@pytest.mark.parametrize("ahead", [True, False], ids=["stored", "on the fly"])
def test_a_negative_prompt_reaches_the_batches_of_a_stream(tmp_path: Path, kind: Texts, ahead: bool) -> None:
    """It is the null condition, as it is of indexed data, of a part of them, and after a change of channels."""
    write_folder(tmp_path / "folder")
    preparation = Preparation(open_pictures(tmp_path / "folder"), Form((8, 8), Crop.CENTER))
    write_prepared(tmp_path / "shards", prepared_images(preparation), preparation.annotations, kind if ahead else None)
    steered = replace(kind, negative="a small dog")
    truth = kind.encode(["a small dog"])
    stream = open_data(f"stream:{tmp_path / 'shards'}", expected=steered)
    indexed = open_dataset(tmp_path / "folder", expected=steered)
    assert isinstance(stream, CaptionStream)
    assert isinstance(indexed.annotations, EncodedCaptions)
    grey = stream.with_channels(1)
    assert (grey.shape, grey.uses_stored, stream.uses_stored) == ((1, 8, 8), ahead, ahead)
    conditions = [next(iter(StreamBatches(some, seed=0, batch=3).starting_at(0))).condition for some in (stream, grey)]
    conditions.append(indexed.read(np.arange(3))[1])
    conditions.append(indexed.annotations.select(np.arange(4, 9)).condition(np.arange(3)))
    for condition in conditions:
        assert isinstance(condition, TextEmbeddings)
        assert torch.equal(condition.null_tokens, truth.tokens[0].half())
        assert torch.equal(condition.null_mask, truth.mask[0])
    assert not torch.equal(truth.tokens[0], truth.null_tokens), "the empty text"
    assert stream.condition_kind.negative == "a small dog"


def test_stored_embeddings_are_checked(kind: Texts) -> None:
    truth = kind.encode(["a red cat"])
    data = embedding_bytes(truth.tokens[0], truth.mask[0])
    assert torch.equal(embedding_of(data, "x", kind), truth.tokens[0][truth.mask[0]].half())
    with pytest.raises(TcmError, match=r"x has a damaged embedding .*; prepare the data again"):
        embedding_of(data[:20], "x", kind)
    wide = embedding_bytes(torch.zeros(2, 99), torch.ones(2, dtype=torch.bool))
    with pytest.raises(TcmError, match=r"x has an embedding of shape \(2, 99\)"):
        embedding_of(wide, "x", kind)


def test_what_a_stream_leaves_out_is_counted(tmp_path: Path, kind: Texts) -> None:
    """A broken image and one without a caption: the rest is read, in an order that resumes exactly."""
    files = samples()
    files[4]["png"], files[9] = b"broken", {"png": files[9]["png"]}
    write_shards(tmp_path / "shards", files)
    stream = open_data(f"stream:{tmp_path / 'shards'}", expected=kind)
    assert isinstance(stream, CaptionStream)
    with pytest.warns(TcmWarning, match=r"1 of \d+ samples are left out; the last one: "):
        batches = list(islice(StreamBatches(stream, seed=0, batch=7).starting_at(0), 8))
    seen = {value_of(image) // 7 for loaded in batches for image in loaded.images}
    assert seen == set(range(24)) - {4, 9}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TcmWarning)
        again = StreamBatches(stream, seed=0, batch=7).starting_at(4, batches[3].resume)
        for loaded, truth in zip(islice(again, 4), batches[4:], strict=True):
            assert torch.equal(loaded.images, truth.images)


def test_a_stream_may_begin_with_broken_images(tmp_path: Path, kind: Texts) -> None:
    """They are counted as others are; a stream of nothing else is refused with the first one's problem."""
    files = samples()
    files[0]["png"] = files[3]["png"] = b"broken"
    write_shards(tmp_path / "shards", files)
    stream = open_data(f"stream:{tmp_path / 'shards'}", expected=kind)
    assert stream.shape == (3, 8, 8)
    with pytest.warns(TcmWarning, match=r"1 of \d+ samples are left out; the last one: .*cannot be read as an image"):
        batches = list(islice(StreamBatches(stream, seed=0, batch=7).starting_at(0), 8))
    assert {value_of(image) // 7 for loaded in batches for image in loaded.images} == set(range(24)) - {0, 3}
    write_shards(tmp_path / "bad", [{"png": b"broken", "txt": b"a cat"} for _ in range(5)])
    with pytest.raises(
        TcmError, match=r"00000.tar/000000 cannot be read as an image .*`tcm data prepare --skip-broken`"
    ):
        open_data(f"stream:{tmp_path / 'bad'}", expected=kind)


def test_rows_without_an_image_are_left_out_of_a_stream(tmp_path: Path, kind: Texts) -> None:
    """The first one, and one whose file is not there any more."""
    datasets = pytest.importorskip("datasets")
    write_folder(tmp_path / "images")
    paths = [str(tmp_path / "images" / f"{index:03d}.png") for index in range(24)]
    rows = {"image": [None, *paths[1:]], "caption": CAPTIONS}
    saved = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    saved.save_to_disk(tmp_path / "saved")
    stream = open_data(f"stream:{tmp_path / 'saved'}", expected=kind)
    with pytest.warns(
        TcmWarning, match=r"1 of \d+ samples are left out; the last one: .* row 0 of shard 0 has no image"
    ):
        batches = list(islice(StreamBatches(stream, seed=0, batch=7).starting_at(0), 8))
    assert {value_of(image) // 7 for loaded in batches for image in loaded.images} == set(range(1, 24))
    with pytest.raises(
        BrokenImage, match=r"row 3 names an image that cannot be read .*; put it there, or leave it out"
    ):
        encoded_bytes({"bytes": None, "path": str(tmp_path / "gone.png")}, "row 3")


def test_too_much_left_out_is_an_error(tmp_path: Path, kind: Texts) -> None:
    files = [{"png": png(1), "txt": b"a cat"} if index % 4 else {"png": png(2)} for index in range(150)]
    write_shards(tmp_path / "shards", files)
    stream = open_data(f"stream:{tmp_path / 'shards'}", expected=kind)
    assert isinstance(stream, CaptionStream)
    with (
        pytest.warns(TcmWarning),
        pytest.raises(TcmError, match=r"samples are left out; .* at most 10% may be: clean the data"),
    ):
        list(islice(StreamBatches(stream, seed=0, batch=30).starting_at(0), 12))
    bare = write_shards(tmp_path / "bare", [{"png": png(1)} for _ in range(4)])
    with pytest.raises(TcmError, match=r"has no captions: its first samples have neither a \.txt nor a \.json"):
        open_data(f"stream:{bare}", expected=kind)


def test_hugging_face_rows(tmp_path: Path, kind: Texts) -> None:
    datasets = pytest.importorskip("datasets")
    write_folder(tmp_path / "images")
    rows = {"image": [str(tmp_path / "images" / f"{index:03d}.png") for index in range(24)], "caption": CAPTIONS}
    datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image()).save_to_disk(tmp_path / "saved")
    dataset = open_dataset(tmp_path / "saved", expected=kind)
    assert list(dataset.captions or ()) == CAPTIONS
    assert dataset.condition_kind == kind
    stream = open_data(f"stream:{tmp_path / 'saved'}", expected=kind)
    loaded = next(iter(StreamBatches(stream, seed=0, batch=5).starting_at(0)))
    numbers = [value_of(image) // 7 for image in loaded.images]
    assert isinstance(loaded.condition, TextEmbeddings)
    truth = kind.encode([CAPTIONS[number] for number in numbers])
    torch.testing.assert_close(loaded.condition.tokens.float(), truth.tokens, atol=2e-3, rtol=2e-3)


def test_emoji_from_their_package(tmp_path: Path) -> None:
    """A package of the same form with three of them; transparent pixels become white."""
    entries = [
        {"name": name, "short_name": short, "unified": code, "image": f"{code}.png", "category": category}
        for name, short, code, category in [
            ("TEAPOT", "teapot", "1FAD6", "Food"),
            ("HEAVY BLACK HEART", "red_heart", "2764", "Symbols"),
            ("Fiji Flag", "flag-fj", next(f"{i:X}" for i in range(99) if is_held_out(f"{i:X}")), "Flags"),
        ]
    ]
    picture = np.zeros((64, 64, 4), np.uint8)
    picture[:32] = (200, 100, 0, 255)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "png")
    with tarfile.open(tmp_path / "package.tgz", "w:gz") as package:
        files = {"emoji.json": json.dumps(entries).encode()}
        files |= {f"img/google/64/{entry['image']}": file.getvalue() for entry in entries}
        for name, data in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(data)
            package.addfile(entry, io.BytesIO(data))
    splits = emoji_splits(tmp_path / "package.tgz")
    assert list(splits["train"].captions or ()) == ["teapot", "heavy black heart, red heart"]
    assert list(splits["test"].captions or ()) == ["fiji flag"]
    assert splits["train"].class_labels is not None
    assert splits["train"].class_labels.names == ("Flags", "Food", "Symbols")
    pixels = splits["train"].pixels(np.arange(1))[0]
    assert pixels.shape == (3, 32, 32)
    assert pixels[:, 0, 0].tolist() == [200, 100, 0]
    assert pixels[:, 31, 31].tolist() == [255, 255, 255]
    (tmp_path / "package.tgz").write_bytes(b"not a package")
    with pytest.raises(TcmError, match=r"package.tgz arrived damaged"):
        emoji_splits(tmp_path / "package.tgz")

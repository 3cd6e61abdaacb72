"""The report's pictures: the same seeds in each stage, conditions, paths from noise, interpolations, neighbours."""

from collections.abc import Callable, Sequence

import torch

from tcm.data import Dataset, open_dataset
from tcm.evaluation.features import load_detector
from tcm.foundation.counting import plural
from tcm.foundation.errors import TcmError
from tcm.report.drawing import COLUMNS, ObservedRun, Origin, PathFromNoise, Showpiece
from tcm.report.html import Content, Html, figure, html, paragraph, rows_of_images, section, side_by_side
from tcm.report.neighbours import closeness, nearest
from tcm.report.records import RunRecord

NEIGHBOURS = 3


def same_seeds(runs: Sequence[ObservedRun]) -> str:
    """The same noises through each model."""

    def render(run: ObservedRun) -> str:
        ways = [("start", way, images) for way, images in (run.origin.ways if run.origin else ())]
        ways += [(one.stage.name, drawn.way, drawn.images) for one in run.drawings for drawn in one.drawn]
        rows = [(Html(f"{html(name)}<small>{way}</small>"), images) for name, way, images in ways]
        label = f"{COLUMNS} samples of the same seeds from each stage of {run.record.name}, one row per stage"
        captions = next((drawing.captions for drawing in run.drawings if drawing.captions), ())
        below = [f"From left to right: {'; '.join(captions)}."] if captions else []
        below += [_origin_text(run.origin)] if run.origin else []
        return figure(rows_of_images(rows), label, " ".join(below)) if rows else ""

    sentence = (
        "Each column begins with the same noise and condition: where it repeats the picture above, the model has kept "
        "to the diffusion model's trajectory; where it does not, it has found its own."
    )
    return _section("Same seeds", sentence, runs, render)


def _origin_text(origin: Origin) -> str:
    given = f"The model given with --init, {origin.name},"
    return f"{given} gives no images: {origin.problem}" if origin.problem else f"{given} is in the rows named start."


def per_condition(runs: Sequence[ObservedRun]) -> str:
    """Samples of each class, or of whatever else the model is conditioned on."""

    def render(run: ObservedRun) -> str:
        piece = run.showpiece
        if piece is None or piece.examples is None:
            return ""
        rows: list[tuple[Content, torch.Tensor]] = list(zip(piece.captions, piece.examples, strict=True))
        label = f"Samples of {run.record.name}, one row per condition"
        return figure(rows_of_images(rows, "two small"), label, f"{piece.stage.name}, {piece.way}")

    sentence = "One row per condition: every image should match it, and no two should be the same."
    return _section("Each condition", sentence, runs, render)


def paths(runs: Sequence[ObservedRun]) -> str:
    """From noise to image in a few steps."""

    def render(run: ObservedRun) -> str:
        piece = run.showpiece
        if piece is None or not piece.paths:
            return ""
        rows = [row for path in piece.paths for row in _path_rows(path, 0)]
        rows += [row for sample in (1, 2) for row in _path_rows(piece.paths[-1], sample)]
        numbers = ", ".join(str(len(path.times)) for path in piece.paths)
        return figure(
            rows_of_images(rows), f"Paths from noise of {run.record.name}, steps: {numbers}", piece.stage.name
        )

    sentence = (
        "Step by step, what the network is given and, to its right, what it returns: the first output is already an "
        "image; each further step starts from what the step before has made."
    )
    return _section("From noise to image", sentence, runs, render)


def interpolations(runs: Sequence[ObservedRun]) -> str:
    """Samples of the noises between two noises."""

    def render(run: ObservedRun) -> str:
        piece = run.showpiece
        if piece is None or piece.interpolations is None:
            return ""
        captions = piece.strip_captions or [""] * len(piece.interpolations)
        rows: list[tuple[Content, torch.Tensor]] = list(zip(captions, piece.interpolations, strict=True))
        label = f"Interpolations between two noises, {run.record.name}"
        return figure(rows_of_images(rows), label, f"{piece.stage.name}, {piece.way}")

    sentence = (
        "From left to right one noise turns into another: the image should change smoothly and stay an image; "
        "jumps or blur in the middle mean a rough map."
    )
    return _section("Between two noises", sentence, runs, render)


def neighbours(runs: Sequence[ObservedRun]) -> str:
    """The training images nearest to samples."""

    def render(run: ObservedRun) -> str:
        if run.showpiece is None:
            return ""
        try:
            dataset = open_dataset(run.record.recipe.data.path, channels=run.record.recipe.data.channels)
            return _neighbours(run.record, run.showpiece, dataset)
        except TcmError as error:
            return paragraph(f"The data set cannot be opened here: {error}", "note")

    sentence = (
        "Samples, and below each the training images nearest to it: a sample that equals one of them would be a copy."
    )
    return _section("Is it memorising?", sentence, runs, render)


def _neighbours(run: RunRecord, piece: Showpiece, dataset: Dataset) -> str:
    latents = dataset.latents
    if tuple(piece.samples.shape[1:]) != (dataset.shape if latents is None else latents.images_of(dataset.shape)):
        return paragraph(f"The data set now holds images of shape {list(dataset.shape)}.", "note")
    samples = piece.samples[:COLUMNS]
    count = min(NEIGHBOURS, dataset.count)
    found = nearest(samples, dataset, count)
    rows: list[tuple[Content, torch.Tensor]] = [("samples", samples)]
    what, unit = ("pixels", "pixels of 255") if latents is None else ("latents", "latents")
    rows += [(_ranked(f"nearest by {what}", index), found.images[:, index]) for index in range(count)]
    if run.recipe.data.path == "digits":
        by_features = nearest(samples, dataset, 1, load_detector("digits"))
        rows.append(("nearest by features", by_features.images[:, 0]))
    close, digits = closeness(piece.samples, dataset), 1 if latents is None else 3
    searched = "" if close.searched == dataset.count else f" (the first {close.searched:,} were searched)"
    caption = (
        f"Median distance to the nearest training image{searched}, root mean square over {unit}: "
        f"{close.samples:.{digits}f} for {len(piece.samples)} samples, {close.training:.{digits}f} for training images "
        "themselves. A value far below the second would mean copying."
    )
    return figure(rows_of_images(rows), f"Samples of {run.name} above their nearest training images", caption)


def _ranked(what: str, index: int) -> str:
    return what if index == 0 else f"{index + 1}."


def _path_rows(path: PathFromNoise, sample: int) -> list[tuple[Content, torch.Tensor]]:
    pairs = torch.stack([path.inputs[:, sample], path.outputs[:, sample]], 1).flatten(0, 1)
    times = ", ".join(f"{t:.3g}" for t in path.times)
    steps = plural(len(path.times), "step")
    return [(Html(f"{steps}<small>seed {sample}, t = {times}</small>"), pairs)]


def _section(title: str, sentence: str, runs: Sequence[ObservedRun], render: Callable[[ObservedRun], str]) -> str:
    """A section with a part for each run that has something to show; none if no run has."""
    parts = [(run.record.name, part) for run in runs if (part := render(run))]
    if not parts:
        return ""
    if len(runs) == 1:
        return section(title, sentence, parts[0][1])
    return section(title, sentence, side_by_side([f"<div><h3>{html(name)}</h3>{part}</div>" for name, part in parts]))

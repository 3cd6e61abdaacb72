"""`tcm eval` and `tcm times`: scores with their conditions, and the best second time."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from tcm.cli.sample import Batch, Device, Label, Steps, Times, sampling_of, shown
from tcm.data import Dataset, Stream, open_data, open_dataset
from tcm.errors import TcmError, TcmWarning
from tcm.evaluation.denoising import denoising_distances, model_denoise
from tcm.evaluation.evaluate import METRICS, Metric, check_detector, evaluate, model_subject, needs_reference_features
from tcm.evaluation.features import Detector, load_detector
from tcm.evaluation.measurement import Subject
from tcm.evaluation.references import (
    PAPERS_COUNT,
    Reference,
    dataset_batches,
    is_published,
    published_reference,
    reference_of,
    stream_reference,
)
from tcm.evaluation.sampling import Sampling, generate, parse_times
from tcm.evaluation.scores import Comparison, Score, append_scores, compare, read_scores
from tcm.evaluation.sharing import share, shared_hash
from tcm.evaluation.times import save_plot, save_second_time, search_time, time_grid
from tcm.training.processes import Processes, join
from tcm.weights import Model, load

Data = Annotated[
    str | None, typer.Option(help="What to compare with: a data set, stream:…, or an .npz with mu and sigma.")
]
Split = Annotated[str, typer.Option(help="The data's part, where it has several.")]
DetectorName = Annotated[str, typer.Option("--detector", help="inception, digits, or a TorchScript file.")]
Seed = Annotated[int, typer.Option(min=0, help="The first image's seed.")]


def evaluation(
    target: Annotated[str | None, typer.Argument(help="A model, or a folder, zip or .npz of images.")] = None,
    data: Data = None,
    detector: DetectorName = "inception",
    metrics: Annotated[str, typer.Option(help=f"Any of {', '.join(METRICS)}, separated by commas.")] = "fid",
    dfid: Annotated[str | None, typer.Option(help="Times at which the model's denoising is measured: 0.2,1,5.")] = None,
    count: Annotated[
        int | None, typer.Option("-n", "--count", min=2, help="How many images; 50000 of a model, all of a set.")
    ] = None,
    steps: Steps = None,
    times: Times = None,
    seed: Seed = 0,
    label: Label = None,
    split: Split = "train",
    batch: Batch = 64,
    device: Device = None,
    scores: Annotated[Path, typer.Option(help="Where each score is appended with its conditions.")] = Path(
        "scores.jsonl"
    ),
    comparison: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Two scores files: print them side by side.")
    ] = None,
) -> None:
    """Measure a model or images against data, or compare two files of scores."""
    if comparison is not None:
        _print_comparison(compare(read_scores(comparison[0]), read_scores(comparison[1])))
        return
    if target is None or data is None:
        raise TcmError("tcm eval needs a TARGET and --data; or --compare with two files of scores")
    wanted = _metrics(metrics)
    sampling, at = sampling_of(steps, times, label), () if dfid is None else parse_times(dfid)
    with join(device) as processes, warnings.catch_warnings():
        warnings.simplefilter("ignore", TcmWarning)  # the table's notes say it
        network = load_detector(detector, processes.device)
        check_detector(network, wanted)
        if is_images(target):
            if (steps, times, label, dfid) != (None, None, None, None):
                raise TcmError(f"{target} holds images; --steps, --times, --class and --dfid are for models")
            images = _all_images(target, count)
            reference = _reference(data, split, network, needs_reference_features(wanted), batch, processes)
            found = _score_images(images, target, reference, wanted, batch, processes)
        else:
            model = load(target).to(processes.device)
            dataset = _dataset(data, split) if at else None
            reference = _reference(data, split, network, needs_reference_features(wanted), batch, processes)
            seeds = range(seed, seed + (count or PAPERS_COUNT))
            found = _score_model(model, target, seeds, sampling, reference, wanted, batch, processes)
            if dataset is not None:
                f, subject = model_denoise(model), model_subject(model, target, None, seed)
                found += denoising_distances(f, dataset, at, reference, subject, count, batch, processes)
        if processes.first:
            append_scores(scores, found)
            _print_scores(found, scores)


def best_times(
    model: Annotated[str, typer.Argument(help="A folder with a consistency model.")],
    data: Annotated[str, typer.Option(help="What to compare with: a data set, or an .npz with mu and sigma.")],
    detector: DetectorName = "inception",
    grid: Annotated[str | None, typer.Option(help="Second times to try, such as 0.5,1,2; by default eight.")] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=2, help="Samples for each time.")] = 10_000,
    seed: Seed = 0,
    split: Split = "train",
    batch: Batch = 64,
    device: Device = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curve as a PNG.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the best time into the model's config.json.")] = False,
) -> None:
    """Search the time of the second of two sampling steps by its distance to the data."""
    if write and not Path(model).is_dir():
        raise TcmError(f"--write: {model} is not a folder here; download the model first")
    with join(device) as processes, warnings.catch_warnings():
        warnings.simplefilter("ignore", TcmWarning)  # the table's note says it
        loaded = load(model).to(processes.device)
        tried = list(parse_times(grid)) if grid is not None else time_grid(loaded)
        reference = _reference(data, split, load_detector(detector, processes.device), False, batch, processes)
        seeds = range(seed, seed + count)
        searched = search_time(loaded, model, seeds, tried, reference, batch, processes)
        console = Console(stderr=True, quiet=not processes.first)
        rows = list(track(searched, "measuring", len(tried), console=console, transient=True))
        if not processes.first:
            return
        best, score = min(rows, key=lambda row: row[1].value)
        _print_times(rows, best)
        if plot is not None:
            save_plot(plot, rows)
        if write:
            save_second_time(Path(model), loaded, best)
        written = f"; written into {model}" if write else ""
        Console().print(f"best second time: {best:.4g} ({score.metric} {score.value:.3f}){written}", highlight=False)


def is_images(target: str) -> bool:
    """Whether a target is a set of images: a path that is there and is no model folder."""
    path = Path(target)
    return path.exists() and not (path / "config.json").exists()


def _metrics(text: str) -> tuple[Metric, ...]:
    chosen = [part.strip() for part in text.split(",")]
    unknown = [part for part in chosen if part not in METRICS]
    if unknown:
        raise TcmError(f"metrics: {unknown[0]!r} is unknown; choose from {', '.join(METRICS)}")
    return tuple(metric for metric in METRICS if metric in chosen)


def _dataset(data: str, split: str) -> Dataset:
    if is_published(Path(data)):
        raise TcmError(f"{data} holds statistics only; dFID and the like need the images, give a data set")
    return open_dataset(data, split=split)


def _reference(data: str, split: str, detector: Detector, keep: bool, batch: int, processes: Processes) -> Reference:
    if is_published(Path(data)):
        return published_reference(Path(data), detector)
    name = data if split == "train" else f"{data} ({split})"
    with Console(stderr=True, quiet=not processes.first).status(f"statistics of {name}"):
        opened = open_data(data, split=split)
        if isinstance(opened, Stream):
            return stream_reference(opened, name, detector, keep, batch, processes)
        return reference_of(opened, name, detector, keep, batch, processes)


def _all_images(target: str, count: int | None) -> Dataset:
    dataset = open_dataset(target)
    if count is not None and count != dataset.count:
        raise TcmError(f"-n {count}: {target} holds {dataset.count} images and all are measured; leave -n out")
    return dataset


def _score_images(
    dataset: Dataset, name: str, reference: Reference, metrics: Sequence[Metric], batch: int, processes: Processes
) -> list[Score]:
    images = shown(dataset_batches(dataset, batch, processes), dataset.count // processes.count, "measuring", processes)
    subject = Subject(name, shared_hash(processes, dataset))
    return evaluate(images, reference, subject, metrics, processes)


def _score_model(
    model: Model,
    name: str,
    seeds: Sequence[int],
    sampling: Sampling,
    reference: Reference,
    metrics: Sequence[Metric],
    batch: int,
    processes: Processes,
) -> list[Score]:
    own = share(processes, seeds)
    images = shown(generate(model, own, sampling, batch), len(own), "sampling", processes)
    subject = model_subject(model, name, sampling.describe(model), seeds[0])
    return evaluate(images, reference, subject, metrics, processes)


def _print_scores(scores: Sequence[Score], file: Path) -> None:
    table = Table(title=f"{scores[0].subject} against {scores[0].reference}", title_justify="left")
    for name in ("metric", "value", "images", "sampling", "note"):
        table.add_column(name, overflow="fold", justify="right" if name in ("value", "images") else "left")
    for score in scores:
        table.add_row(
            score.label, _value(score), f"{score.count:,}", escape(score.sampling or ""), escape(score.note or "")
        )
    console = Console()
    console.print(table)
    one = scores[0]
    known = "an unknown number of" if one.reference_count is None else f"{one.reference_count:,}"
    console.print(
        f"reference {one.reference_hash[:12]} ({known} images); detector {one.detector} {one.detector_hash[:12]} "
        f"({escape(one.preprocessing)}); {one.quantisation}; appended to {file}",
        highlight=False,
        soft_wrap=True,
    )


def _value(score: Score) -> str:
    return f"{score.value:.4g}" + ("" if score.deviation is None else f" ± {score.deviation:.2g}")


def _print_comparison(pairs: Sequence[Comparison]) -> None:
    table = Table(title=f"{pairs[0].first.count:,} images against {pairs[0].first.reference}", title_justify="left")
    for name in ("metric", _column(pairs[0].first), _column(pairs[0].second), "difference"):
        table.add_column(name, overflow="fold", justify="left" if name == "metric" else "right")
    for pair in pairs:
        change = pair.second.value - pair.first.value
        table.add_row(pair.first.label, _value(pair.first), _value(pair.second), f"{change:+.4g}")
    Console().print(table)


def _column(score: Score) -> str:
    return escape(score.subject + (f" ({score.sampling})" if score.sampling else ""))


def _print_times(rows: Sequence[tuple[float, Score]], best: float) -> None:
    table = Table(title=f"two-step sampling, {rows[0][1].count:,} samples for each time", title_justify="left")
    for name in ("second time", rows[0][1].metric):
        table.add_column(name, justify="right")
    table.add_column("")
    highest = max(score.value for _, score in rows)
    for t, score in rows:
        bar = "█" * max(1, round(30 * score.value / max(highest, 1e-12)))
        table.add_row(f"{t:.4g}", f"{score.value:.4g}", bar, style="bold green" if t == best else "")
    Console().print(table)
    if rows[0][1].note is not None:
        Console().print(f"note: {rows[0][1].note}", highlight=False)

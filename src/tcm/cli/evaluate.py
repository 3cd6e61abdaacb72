"""`tcm eval` and `tcm times`: scores with their conditions, and the best second time."""

import warnings
from pathlib import Path
from typing import Annotated

import typer

from tcm.cli.data import Split
from tcm.cli.sample import STEPS_HELP, Batch, ClassOption, Device, Guidance, TimesOption, model_of, sampling_of
from tcm.foundation.errors import TcmError, TcmWarning

Data = Annotated[
    str | None,
    typer.Option(help="What to compare with: a data set, stream:…, or an .npz with mu and sigma. [a run's own data]"),
]
DetectorName = Annotated[
    str, typer.Option("--detector", help="inception, digits, efficientnet-lite0, or a TorchScript file.")
]
DFID_HELP = (
    "Also measure dFID at these times, such as 0.2,1,5 (may be repeated): the FID of the data's images with noise of "
    "level t, denoised in one step."
)
FEW_IMAGES = r"\d+ images give a covariance of rank"
Seed = Annotated[int, typer.Option(min=0, help="The first image's seed.")]
DataConditions = Annotated[
    bool,
    typer.Option(
        "--data-conditions",
        help="Take each sample's condition (class, caption) from an image of the data, picked by the sample's seed.",
    ),
]


def evaluation(
    target: Annotated[
        str | None,
        typer.Argument(
            help="A model, a run (its last stage) or one of its stages, or a folder, zip or .npz of images."
        ),
    ] = None,
    data: Data = None,
    detector: DetectorName = "inception",
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            help="Any of fid, fid-infinity, kid, is, precision-recall, separated by commas; may be repeated. [fid]"
        ),
    ] = None,
    dfid: Annotated[list[str] | None, typer.Option(help=DFID_HELP)] = None,
    count: Annotated[
        int | None,
        typer.Option("-n", "--count", min=2, help="How many images. [50000 from a model, all of a data set]"),
    ] = None,
    steps: Annotated[list[int] | None, typer.Option(min=1, help=f"{STEPS_HELP} May be repeated.")] = None,
    times: TimesOption = None,
    seed: Seed = 0,
    choice: ClassOption = None,
    data_conditions: DataConditions = False,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Draw one image for each prompt in this file: one per line, a JSON list, or COCO's captions."
        ),
    ] = None,
    guidance: Guidance = None,
    resize: Annotated[
        int | None,
        typer.Option(min=1, help="Resize a model's images to this many pixels a side (Lanczos) before measuring."),
    ] = None,
    clip: Annotated[
        str | None, typer.Option(help="Also measure the CLIP score of --prompts, with the CLIP model in this folder.")
    ] = None,
    retrieval: Annotated[
        bool,
        typer.Option(
            "--retrieval",
            help="Also draw the data's captions, and score how often the nearest image of the data has that caption.",
        ),
    ] = False,
    split: Split = "train",
    batch: Batch = 64,
    device: Device = None,
    scores: Annotated[
        Path | None,
        typer.Option(
            help="The file to append the scores to, each with its conditions. [scores.jsonl in the run's folder, else "
            "here]"
        ),
    ] = None,
    comparison: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Two scores files: print them side by side.")
    ] = None,
    reference_count: Annotated[
        int | None,
        typer.Option(min=2, help="Compare with only this many images of the data: faster, but not a published FID."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the scores as JSON.")] = False,
) -> None:
    """Measure a model or images against data, or compare two files of scores."""
    from tcm.cli import scoring
    from tcm.cli.model_scores import Asked, scores_of_model
    from tcm.evaluation.evaluate import check_detector
    from tcm.evaluation.features import load_detector
    from tcm.evaluation.generation import parse_times
    from tcm.evaluation.scores import append_scores, compare, read_scores
    from tcm.foundation.processes import join
    from tcm.recipes.folders import SCORES_FILE, run_of
    from tcm.weights import load

    if comparison is not None:
        pairs = compare(read_scores(comparison[0]), read_scores(comparison[1]))
        (scoring.print_json if as_json else scoring.print_comparison)(pairs)
        return
    run = None if target is None else run_of(Path(target))
    if target is None or (data is None and run is None):
        raise TcmError("tcm eval needs a TARGET and --data, or --compare with two files of scores")
    source = (
        scoring.ReferenceData.of_run(run, split) if run and data is None else scoring.ReferenceData(str(data), split)
    )
    numbers: list[int | None] = [*steps] if steps else [None]
    samplings = tuple(dict.fromkeys(sampling_of(number, times, choice) for number in numbers))
    file = scores or (run or Path()) / SCORES_FILE
    asked = Asked(
        *(source, scoring.chosen_metrics(metrics or ["fid"]), samplings, seed, count, batch),
        reference_count=reference_count,
        dfid=parse_times(",".join(dfid), "dfid") if dfid else (),
        data_conditions=data_conditions,
        prompts=prompts,
        guidance=guidance,
        resize=resize,
        clip=clip,
        retrieval=retrieval,
    )
    with join(device) as processes, warnings.catch_warnings():
        warnings.filterwarnings("ignore", FEW_IMAGES, TcmWarning)  # the table's notes say it
        with processes.agreeing():
            target = model_of(target, processes)
        network = load_detector(detector, processes.device)
        check_detector(network, asked.metrics)
        if scoring.is_images(target):
            asked.check_images(target)
            images = scoring.all_images(target, count)
            reference = asked.reference(images.shape, network, processes)
            found = scoring.score_images(images, target, reference, asked.metrics, batch, processes)
        else:
            model = load(target).to(processes.device)
            found = scores_of_model(model, target, asked, network, processes)
        if processes.first:
            append_scores(file, found)
            if as_json:
                scoring.print_json(found)
            else:
                scoring.print_scores(found, file)


def best_times(
    model: Annotated[
        str, typer.Argument(help="A folder with a consistency model, or a run's folder (its last stage).")
    ],
    data: Annotated[str, typer.Option(help="What to compare with: a data set, or an .npz with mu and sigma.")],
    detector: DetectorName = "inception",
    grid: Annotated[str | None, typer.Option(help="Second times to try, such as 0.5,1,2. [a grid of eight]")] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=2, help="Samples per time.")] = 10_000,
    seed: Seed = 0,
    data_conditions: DataConditions = False,
    split: Split = "train",
    batch: Batch = 64,
    device: Device = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curve to this PNG file.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write the best time into the model's config.json.")] = False,
) -> None:
    """Find the best time for the second of two sampling steps, by the distance to the data."""
    from rich.console import Console
    from rich.progress import track

    from tcm.cli import scoring
    from tcm.cli.model_scores import check_prompted
    from tcm.evaluation.features import load_detector
    from tcm.evaluation.generation import conditions_of, parse_times
    from tcm.evaluation.second_time import save_plot, save_second_time, search_time, time_grid
    from tcm.foundation.processes import join
    from tcm.weights import load

    if write and not Path(model).is_dir():
        raise TcmError(f"--write: {model} is not a local folder; download the model first")
    with join(device) as processes, warnings.catch_warnings():
        warnings.filterwarnings("ignore", FEW_IMAGES, TcmWarning)  # the table's note says it
        with processes.agreeing():
            model = model_of(model, processes)
        loaded = load(model).to(processes.device)
        check_prompted(loaded, data_conditions, "--data-conditions for the data's own captions")
        tried = list(parse_times(grid, "grid")) if grid is not None else time_grid(loaded)
        network = load_detector(detector, processes.device)
        source = scoring.ReferenceData(data, split)
        reference = source.reference(loaded.card.picture_shape, network, False, batch, processes)
        condition = conditions_of(source.dataset(loaded.card.condition)) if data_conditions else None
        seeds = range(seed, seed + count)
        searched = search_time(loaded, model, seeds, tried, reference, batch, processes, condition)
        console = Console(stderr=True, quiet=not processes.first)
        rows = list(track(searched, "measuring", len(tried), console=console, transient=True))
        if not processes.first:
            return
        best, score = min(rows, key=lambda row: row[1].value)
        note = scoring.edge_note(tried, best, (loaded.denoiser.t_min, loaded.denoiser.t_max))
        scoring.print_times(rows, best)
        if plot is not None:
            save_plot(plot, rows)
        if write:
            save_second_time(Path(model), loaded, best)
        written = f"; written into {model}" if write else ""
        Console().print(f"best second time: {best:.4g} ({score.metric} {score.value:.3f}){written}", highlight=False)
        if note is not None:
            Console().print(f"note: {note}", highlight=False, soft_wrap=True)

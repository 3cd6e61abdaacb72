"""`tcm push`: a model on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcm.cli.flags import ModelName
from tcm.foundation.errors import TcmError

if TYPE_CHECKING:
    from tcm.weights.hub_card import CardScore
    from tcm.weights.model import Model


def push_model(
    model: ModelName,
    repository: Annotated[str, typer.Argument(help="The repository on the hub, such as someone/name.")],
    scores: Annotated[
        Path | None,
        typer.Option("--scores", help="A scores.jsonl; the card shows its scores of this model. [the run's own]"),
    ] = None,
    licence: Annotated[
        str | None, typer.Option("--licence", help="The licence of your own model, such as apache-2.0.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="If the repository is new, make it private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write the folder and upload nothing.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="With --dry-run: the folder to write. [NAME-hub]")] = None,
) -> None:
    """Upload a model to the Hugging Face hub, with a card: what it is, its scores, samples, and how to use it."""
    from tcm.cli.sample import model_of
    from tcm.recipes.folders import RECIPE_FILE
    from tcm.weights import load
    from tcm.weights.hub import HubFolder, push

    if out is not None and not dry_run:
        raise TcmError(f"--out={out} is only for --dry-run; add --dry-run, or leave --out out")
    found = model_of(model)
    loaded = load(found)
    run = _run_of(Path(model), Path(found))
    recipe = (run / RECIPE_FILE).read_text("utf-8") if run is not None else None
    folder = HubFolder(loaded, repository, _scores_of(loaded, scores, run), recipe, licence)
    if dry_run:
        path = out or Path(f"{repository.rpartition('/')[2]}-hub")
        folder.write(path)
        typer.echo(f"{path}: what would be uploaded to {repository}")
    else:
        typer.echo(push(folder, private=private))


def _run_of(given: Path, folder: Path) -> Path | None:
    """The run that a model comes from, if its folder is still there."""
    from tcm.weights import is_run

    return next((place for place in (given, folder.resolve().parent.parent) if is_run(place)), None)


def _scores_of(model: Model, file: Path | None, run: Path | None) -> list[CardScore]:
    """The scores of these very weights in a file, or in that of the run."""
    from tcm.evaluation.features import weights_hash
    from tcm.evaluation.scores import read_scores
    from tcm.recipes.folders import SCORES_FILE
    from tcm.weights.hub_card import CardScore

    if file is None:
        file = run / SCORES_FILE if run is not None else None
        if file is None or not file.is_file():
            return []
    digest = weights_hash(model.denoiser.state_dict())
    return [
        CardScore(
            # The hub reads "fid" as Inception's, which a distance in other features must not be taken for.
            kind=score.kind if score.kind != "fid" or score.detector == "inception" else "frechet_distance",
            metric=score.label,
            value=score.value,
            deviation=score.deviation,
            sampling=score.way or "denoising of the data",
            images=score.count,
            reference=score.reference,
            reference_images=score.reference_count,
            detector=score.detector,
        )
        for score in read_scores(file)
        if score.subject_hash == digest
    ]

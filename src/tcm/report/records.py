"""What a run's folder holds: recipe, progress, numbers, events, scores; a run in progress or a failed one too."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tcm.evaluation.scores import Score, read_scores
from tcm.foundation.errors import TcmError
from tcm.method.sampling import Sampler
from tcm.recipes.decided import settled
from tcm.recipes.folders import RECIPE_FILE, SCORES_FILE, stage_folders
from tcm.recipes.resolve import noted_recipe
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Stage
from tcm.training.checkpoint import newest_step
from tcm.training.health import warnings_in
from tcm.training.metrics import METRICS_FILE, read_metrics
from tcm.training.resuming import noted_init
from tcm.training.starts import Start, read_starts

Status = Literal["finished", "failed", "unfinished", "not begun"]


@dataclass(frozen=True)
class StageRecord:
    """A stage as its folder shows it; `lines` are those of metrics.jsonl.

    `span` are the times that it trains on; `forgets_below` is a truncated model's t', None for others. A model that
    `generates` makes images from noise. `starts` says when and where the training was started.
    """

    name: str
    spec: Stage
    sampler: Sampler
    span: tuple[float, float]
    generates: bool
    forgets_below: float | None
    folder: Path
    lines: list[dict[str, Any]]
    starts: list[Start]
    other_roles: tuple[str, ...] = ()
    """The models that it trains besides the student."""

    @property
    def model(self) -> Path:
        """The folder of the stage's model, which is there once the stage is finished."""
        return self.folder / "model"

    @property
    def status(self) -> Status:
        """How far the stage has come."""
        if self.model.is_dir():
            return "finished"
        if not self.folder.is_dir():
            return "not begun"
        return "failed" if self.lines and self.lines[-1].get("event") == "failed" else "unfinished"

    @property
    def step(self) -> int:
        """The last step that is known: that of the newest checkpoint, or of the metrics since."""
        return max((newest_step(self.folder), *(int(line["step"]) for line in self.lines)))

    @property
    def warnings(self) -> list[str]:
        """Signs that the stage has not learned what it should."""
        return warnings_in(self.lines)

    @property
    def numbers(self) -> list[dict[str, Any]]:
        """The lines with losses, in order."""
        return [line for line in self.lines if "loss" in line]

    @property
    def losses(self) -> dict[str, str]:
        """The trained models that have a loss so far, and its key in the lines: `loss`, or another's `fake.loss`."""
        keys = {"student": "loss"} | {role: f"{role}.loss" for role in self.other_roles}
        return {role: key for role, key in keys.items() if any(key in line for line in self.lines)}

    @property
    def events(self) -> list[dict[str, Any]]:
        """The lines that say that something happened."""
        return [line for line in self.lines if "event" in line]

    @property
    def seconds(self) -> float:
        """Wall time of the steps: each line covers the steps since the line before, at its images per second."""
        total, step, skipped = 0.0, 0, 0
        for line in self.numbers:
            updates = line["step"] - step - (line["skipped"] - skipped)
            total += max(updates, 0) * self.spec.batch / line["images_per_second"]
            step, skipped = line["step"], line["skipped"]
        return total

    @property
    def latest_samples(self) -> Path | None:
        """The newest grid of samples that training wrote."""
        grids = sorted((self.folder / "samples").glob("step-*.png"))
        return grids[-1] if grids else None


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder shows it; `scores_problem` says why there are no scores although there is a file.

    `init` is the model that was given with --init.
    """

    name: str
    folder: Path
    recipe: Recipe
    stages: list[StageRecord]
    scores: list[Score]
    scores_problem: str | None = None
    init: str | None = None


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read several runs; they are named after their folders, or by their paths where two folders share a name.

    >>> [stage.status for stage in read_runs([Path("runs/digits")])[0].stages]  # doctest: +SKIP
    ['finished', 'finished', 'unfinished']
    """
    names = [folder.resolve().name for folder in folders]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    return [_read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path) -> RunRecord:
    """Read one run's folder."""
    return read_runs([folder])[0]


def _read_run(folder: Path, name: str) -> RunRecord:
    if not (folder / RECIPE_FILE).is_file():
        raise TcmError(f"{folder} holds no {RECIPE_FILE}; give the folder of a run, such as runs/digits")
    recipe = settled(noted_recipe(folder), folder)
    stages = [_read_stage(recipe, stage, path) for stage, path in stage_folders(recipe, folder).items()]
    scores: list[Score] = []
    problem = None
    if (folder / SCORES_FILE).is_file():
        try:
            scores = read_scores(folder / SCORES_FILE)
        except TcmError as error:
            problem = str(error)
    return RunRecord(name, folder, recipe, stages, scores, problem, noted_init(None, folder))


def _read_stage(recipe: Recipe, name: str, folder: Path) -> StageRecord:
    spec = recipe.stages[name]
    span = spec.span(recipe)
    lines = _lines(folder / METRICS_FILE)
    generates, t_prime = spec.start(recipe) is not None, spec.forgets_below(recipe)
    sampler = spec.sampler(recipe.second_time)
    others = tuple(key for key, role in spec.roles(recipe).items() if role.trained and key != "student")
    return StageRecord(name, spec, sampler, span, generates, t_prime, folder, lines, read_starts(folder), others)


def _lines(path: Path) -> list[dict[str, Any]]:
    return read_metrics(path) if path.is_file() else []

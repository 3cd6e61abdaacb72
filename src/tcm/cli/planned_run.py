"""A run on one's own images: it is planned once, and its folder keeps the plan and what it was planned for."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from tcm.cli.plan import USUAL_BUDGET, parse_budget, planned, source_of, table
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.files import read_record, write_text

if TYPE_CHECKING:
    from tcm.foundation.processes import Processes

PLAN_FILE, PREPARED_FILE, REQUEST_FILE = "plan.toml", "data.zip", "planned.json"


@dataclass(frozen=True)
class Request:
    """What a run was planned for; `files` and `content` say which images the data were then."""

    data: str
    budget: str
    files: str | None = None
    content: str | None = None

    def renewed(self) -> Request | None:
        """The request with what its data look like now; None if they are others. They are read if they look changed."""
        from tcm.data.hashing import content_of, files_of
        from tcm.data.opening import open_pictures

        source = open_pictures(self.data)
        files = files_of(source)
        if files is not None and files == self.files:
            return self
        content = content_of(source)
        return replace(self, files=files, content=content) if self.content in (None, content) else None

    def note(self, run: Path) -> None:
        """Write it into the run's folder."""
        write_text(run / REQUEST_FILE, json.dumps(asdict(self)))


def planned_recipe(data: str, run: Path, budget: str | None, processes: Processes) -> str:
    """The recipe of a run on a data set: the run's own, or that of a new plan, which the run's folder keeps."""
    from rich.console import Console

    from tcm.recipes.folders import RECIPE_FILE
    from tcm.training.locking import only_one

    prepared = run / PREPARED_FILE
    if (run / RECIPE_FILE).is_file():
        if processes.first:
            _check_images(_request(run, data, budget), run)
        return str(run / RECIPE_FILE)
    if processes.count > 1:
        raise TcmError(f"{data} can only be planned by one process; run `tcm plan {data}` first, then train its recipe")
    seconds = parse_budget(budget or USUAL_BUDGET)
    with only_one(run, processes):
        if prepared.exists() and _request(run, data, None).renewed() is None:
            prepared.unlink()
        request = Request(source_of(data), budget or USUAL_BUDGET).renewed()
        assert request is not None, "nothing was noted that could differ"
        request.note(run)
        try:
            found = planned(str(prepared) if prepared.exists() else data, seconds, processes, prepared)
        except BaseException:
            if not prepared.exists():
                (run / REQUEST_FILE).unlink()
            raise
        write_text(run / PLAN_FILE, found.toml())
    Console().print(table(found))
    return str(run / PLAN_FILE)


def warn_of_changed_images(run: Path) -> None:
    """Say that a run resumes with images that were prepared from others than its source holds by now."""
    if (run / PREPARED_FILE).exists() and (run / REQUEST_FILE).is_file():
        noted = _noted(run)
        try:
            changed = os.path.exists(noted.data) and noted.renewed() is None
        except TcmError:  # nothing is left there that could be opened
            changed = True
        if changed:
            text = f"{noted.data} has changed since; {run} goes on with the images as they were, in {PREPARED_FILE}"
            warnings.warn(text, TcmWarning, stacklevel=2)


def _noted(run: Path) -> Request:
    noted = read_record(run / REQUEST_FILE)
    try:
        return Request(**json.loads(noted))
    except (ValueError, TypeError, RecursionError) as error:
        raise TcmError(
            f"{run / REQUEST_FILE} does not say what the run was planned for ({error}); remove it, and resume the run "
            f"with `tcm train {run}`"
        ) from error


def _request(run: Path, data: str, budget: str | None) -> Request:
    """What the run was planned for; refuses other data and another budget."""
    from tcm.recipes.folders import RECIPE_FILE

    if not (run / REQUEST_FILE).is_file():
        raise TcmError(f"{run} was not planned from {data}; resume it with `tcm train {run}`, or give another --run")
    noted = _noted(run)
    if noted.data != source_of(data):
        begun = (run / RECIPE_FILE).is_file()
        resume = f"tcm train {quote(str(run))}" if begun else f"tcm train {quote(noted.data)} --run {quote(str(run))}"
        raise TcmError(
            f"{run} was planned from {noted.data}, not from {source_of(data)}; give another --run, or "
            f"resume it with `{resume}`"
        )
    if budget is not None and parse_budget(budget) != parse_budget(noted.budget):
        raise TcmError(
            f"--budget={budget}: {run} was planned for {noted.budget}; leave --budget out and give more steps, such "
            "as truncated.steps=5000, or give another --run"
        )
    return noted


def _check_images(noted: Request, run: Path) -> None:
    """Refuse to resume a run whose images have changed; those that only look changed are noted as they look now."""
    now = noted.renewed()
    if now is None:
        others = ", or put the old ones back"
        if (run / PREPARED_FILE).exists():
            others = f", put the old ones back, or go on with them as they were: tcm train {run}"
        raise TcmError(
            f"{noted.data} has changed since {run} was planned from it; train on the new images with another --run"
            f"{others}"
        )
    if now != noted:
        now.note(run)

"""A score and everything that it depends on: written to `scores.jsonl`, and compared only where it may be."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from tcm.foundation.errors import TcmError
from tcm.foundation.files import LARGEST_RECORD, read_record, read_regular

Kind = Literal["fid", "fid-infinity", "kid", "is", "precision", "recall", "clip-score", "retrieval", "class-retrieval"]
"""What can be measured: `fid` is the Fréchet distance in the features of any detector."""
ConditionSource = Literal["drawn", "chosen", "given"]
"""How the conditions of samples came about: drawn from the seeds, one that a user chose for all, or given for each."""

# What two scores under the same conditions may differ in: the result, names (the hashes decide), and when.
_RESULT = ("value", "deviation", "note", "versions", "time", "subject", "step", "reference")
# And, where they are compared, the thing measured. The metric says more than its kind, which older files lack.
_MEASURED = ("kind", "subject_hash", "sampling", "conditions", "seed")
_GIVEN = ", given conditions"


@dataclass(frozen=True)
class Score:
    """One number with its conditions; `t` is the noise level at which denoising was measured.

    `kind` is what is measured, `metric` its name with this detector.

    `subject` and `sampling` say what was measured; `step` is that of a checkpoint, None for a finished model or images.
    `seed` is the first of its seeds, None for images that are there already. `conditions` is None if the model takes
    none. All hashes are SHA-256.
    """

    kind: Kind
    metric: str
    t: float | None
    value: float
    deviation: float | None
    count: int
    subject: str
    subject_hash: str
    step: int | None
    sampling: str | None
    conditions: ConditionSource | None
    seed: int | None
    detector: str
    detector_hash: str
    preprocessing: str
    quantisation: str
    reference: str
    reference_hash: str
    reference_count: int | None
    settings: str
    note: str | None
    versions: str
    time: str

    @property
    def label(self) -> str:
        """The metric as a label, such as `dFID at t=1`."""
        return self.metric if self.t is None else f"{self.metric} at t={self.t:g}"

    @property
    def set_conditions(self) -> bool:
        """Whether its conditions were chosen or given, rather than left to the model's kind of condition."""
        return self.conditions not in (None, "drawn")

    @property
    def way(self) -> str:
        """How it was sampled, in words for tables."""
        return (self.sampling or "") + (_GIVEN if self.conditions == "given" else "")


def append_scores(path: Path, scores: Sequence[Score]) -> None:
    """Append one line of JSON for each score; lines already there stay as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(asdict(score), ensure_ascii=False) + "\n" for score in scores)
    whole = read_regular(path, LARGEST_RECORD).rpartition(b"\n") if path.exists() else (b"", b"", b"")
    with path.open("ab", buffering=0) as file:
        if whole[2]:
            file.truncate(len(whole[0]) + len(whole[1]))  # a line that a kill cut off
        file.write(lines.encode())  # in one piece, so that the lines of two processes do not mix


def read_scores(path: Path) -> list[Score]:
    """All scores of a `scores.jsonl`; a last line without an end was cut off when it was written, and is left out."""
    if not path.is_file():
        raise TcmError(f"{path} does not exist; `tcm eval` writes it")
    known = {field.name for field in fields(Score)}
    scores = []
    whole = read_record(path).rpartition("\n")[0]
    for number, line in enumerate(whole.split("\n") if whole else [], 1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TcmError(f"{path}, line {number} is not JSON ({error}); remove the line") from error
        if isinstance(found, dict) and "metric" in found:
            earlier = {"kind": _kind_of(str(found["metric"])), "step": _step_of(str(found.get("subject")))}
            found = earlier | _with_conditions(found)
        if not isinstance(found, dict) or found.keys() != known:
            raise TcmError(f"{path}, line {number} is not a score of this version; remove the line or measure again")
        if isinstance(found["value"], bool) or not isinstance(found["value"], int | float):
            raise TcmError(f"{path}, line {number}: value={found['value']!r} is not a number; remove the line")
        scores.append(Score(**found))
    return scores


def _kind_of(metric: str) -> Kind:
    """The kind of a score that was written before scores had one."""
    if metric.endswith("∞"):
        return "fid-infinity"
    if metric == "KID" or metric.startswith("kernel distance"):
        return "kid"
    if metric == "Inception score" or metric.startswith("class score"):
        return "is"
    return "precision" if metric == "precision" else "recall" if metric == "recall" else "fid"


def _step_of(subject: str) -> int | None:
    """The step of a score that was written before scores had one: `truncated@300` was the checkpoint's name."""
    step = subject.rpartition("@")[2]
    return int(step) if "@" in subject and step.isdecimal() else None


def _with_conditions(found: dict[str, object]) -> dict[str, object]:
    """A score that was written before scores had this field: its sampling said so if conditions were given."""
    sampling = found.get("sampling")
    if "conditions" in found or not isinstance(sampling, str):
        return {"conditions": None} | found
    given = sampling.endswith(_GIVEN)
    return found | {"sampling": sampling.removesuffix(_GIVEN), "conditions": "given" if given else "drawn"}


def differing_conditions(a: Score, b: Score) -> list[str]:
    """What makes two scores incomparable, such as `count: 2000 and 5000`; empty if they may be compared."""
    return [
        f"{name}: {_short(getattr(a, name))} and {_short(getattr(b, name))}"
        for name in _differing(a, b)
        if name not in _MEASURED
    ]


def already_measured(wanted: Score, known: Sequence[Score]) -> Score | None:
    """The known score of the same thing under the same conditions: measured again, `wanted` would be this one."""
    return next((score for score in known if not _differing(wanted, score)), None)


def _differing(a: Score, b: Score) -> list[str]:
    names = (field.name for field in fields(Score) if field.name not in _RESULT)
    return [name for name in names if getattr(a, name) != getattr(b, name)]


def _short(value: object) -> str:
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text


@dataclass(frozen=True)
class Comparison:
    """Two comparable scores of the same metric."""

    first: Score
    second: Score


def compare(first: Sequence[Score], second: Sequence[Score]) -> list[Comparison]:
    """Pair the latest score of each metric in both; raises TcmError that names the conditions that differ."""
    left, right = ({score.label: score for score in scores} for scores in (first, second))
    common = [label for label in left if label in right]
    if not common:
        raise TcmError(
            f"the files have no metric in common ({', '.join(left) or 'none'}; {', '.join(right) or 'none'}); "
            "measure the same one for both"
        )
    for label in common:
        differing = differing_conditions(left[label], right[label])
        if differing:
            raise TcmError(
                f"the two scores {label} cannot be compared, because their conditions differ: {'; '.join(differing)}; "
                "measure both again under the same conditions"
            )
    return [Comparison(left[label], right[label]) for label in common]

"""Masks that student and target share, against torch's own dropout, where each pass draws its own, and against none."""

from collections.abc import Callable
from unittest.mock import patch

from torch import Tensor
from torch.nn import functional as F

from benchmarks.cases import Case, ddpmpp, small
from benchmarks.harness import Row, Settings, in_fresh_process, interleave, peak_bytes, ratio
from benchmarks.stages import steps

TITLE = "shared dropout against dropout that is not shared"
KINDS = ("shared", "not shared", "none")


def measure(settings: Settings) -> list[Row]:
    rows = []
    for case, rounds in ((ddpmpp(settings), 2), (small(settings), 4)):
        times = interleave(settings, {kind: dropping(case, kind) for kind in KINDS}, rounds)
        rows.append(ratio(f"{case.size}: time shared / not shared", times["shared"], times["not shared"], "≤ 1.02"))
        rows.append(ratio(f"{case.size}: time shared / no dropout", times["shared"], times["none"]))
        shared, own, none = (in_fresh_process(peak, case, kind) for kind in KINDS)
        rows.append(Row(f"{case.size}: peak memory shared / not shared", shared / own, "×", goal="≤ 1.03"))
        rows.append(Row(f"{case.size}: peak memory shared / no dropout", shared / none, "×"))
    return rows


def dropping(case: Case, kind: str) -> Callable[[], object]:
    """A step of stage 1 with dropout 0.2 of a kind."""
    step = steps(case, "consistency", f"network.dropout={0.0 if kind == 'none' else 0.2}")
    if kind != "not shared":
        return step

    def unshared(x: Tensor, masks: object, index: int, rate: float) -> Tensor:
        return F.dropout(x, rate)

    def run() -> None:
        with (
            patch("tcm.networks.ddpmpp.drop", unshared),
            patch("tcm.method.preconditioning.Network.draw_masks", lambda network, streams: None),
        ):
            step()

    return run


def peak(case: Case, kind: str) -> float:
    """Peak bytes of a process that makes a step."""
    dropping(case, kind)()
    return peak_bytes()

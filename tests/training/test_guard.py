"""The guard as a pure function, and in training: NaN losses, a spike, going back with other noise, giving up."""

from dataclasses import dataclass, replace
from math import inf, isfinite, nan
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inprocess import begin, events, weights_of
from launching import lines

from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.objectives import Batch, Losses, Models, Objective
from tcm.recipes.stages import GuardSpec
from tcm.training.guard import FIRST_JUDGED, GuardState, judge

NO_SAMPLES = "diffusion.sample_every=0"

any_number = st.floats(min_value=0) | st.just(nan)
states = st.builds(GuardState, st.floats(1e-3, 1e3), st.integers(0, 200), st.integers(0, 9), st.integers(0, 100))


@given(states, any_number, any_number)
def test_judge(state: GuardState, loss: float, norm: float) -> None:
    limits = GuardSpec(spike=20, patience=10)
    after, verdict, reason = judge(limits, state, loss, norm)
    spike = state.seen >= FIRST_JUDGED and norm > 20 * state.scale
    bad = not isfinite(loss) or not isfinite(norm) or spike
    assert (verdict != "good") == bad == bool(reason)
    if bad:
        assert (after.scale, after.seen) == (state.scale, state.seen)
        assert (after.in_a_row, after.skipped) == (state.in_a_row + 1, state.skipped + 1)
        assert (verdict == "go back") == (state.in_a_row == 9)
    else:
        assert (after.in_a_row, after.skipped, after.seen) == (0, state.skipped, state.seen + 1)
        low, high = sorted((state.scale, norm))
        assert low * (1 - 1e-12) <= after.scale <= high * (1 + 1e-12) or state.seen == 0


@given(states, any_number, any_number)
def test_off_means_off_and_the_scale_stays_finite(state: GuardState, loss: float, norm: float) -> None:
    after, verdict, reason = judge(GuardSpec(on=False), state, loss, norm)
    assert (verdict, reason) == ("good", "")
    assert isfinite(after.scale)


def test_the_scale_follows_the_mean_of_the_first_norms() -> None:
    state = GuardState()
    for norm in (1.0, 2.0, 3.0):
        state, _, _ = judge(GuardSpec(), state, 0.0, norm)
    assert state.scale == pytest.approx(2.0)


@dataclass(frozen=True)
class Ill(Objective):
    """An objective whose loss is multiplied by `factor` at some steps; where `curable`, for the first noise only."""

    whole: Objective
    at: frozenset[int]
    factor: float
    curable: bool = False

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        losses = self.whole.loss(models, batch, step, streams, turn)
        if step not in self.at or (self.curable and step in SEEN and float(losses.t[0]) != SEEN[step]):
            return losses
        SEEN.setdefault(step, float(losses.t[0]))
        return replace(losses, total=losses.total * self.factor)


SEEN: dict[int, float] = {}


@pytest.fixture(autouse=True)
def _forget() -> None:
    SEEN.clear()


@pytest.mark.parametrize("factor", [nan, inf])
def test_bad_losses_are_skipped(tmp_path: Path, factor: float) -> None:
    wrap = lambda objective: Ill(objective, frozenset({3, 5}), factor)  # noqa: E731
    loop, stop = begin(tmp_path, "diffusion", wrap, NO_SAMPLES)
    assert loop.run(stop)
    skipped = [event for event in events(tmp_path) if event["event"] == "skipped"]
    assert [event["step"] for event in skipped] == [4, 6]
    assert skipped[0]["reason"] == f"the loss is {factor}"
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights_of(loop).values())


def test_a_gradient_spike_is_skipped(tmp_path: Path) -> None:
    loop, stop = begin(
        tmp_path,
        "diffusion",
        lambda objective: Ill(objective, frozenset({FIRST_JUDGED + 2}), 1e6),
        f"diffusion.steps={FIRST_JUDGED + 4}",
        "diffusion.checkpoint_every=100",
        "diffusion.batch=4",
        NO_SAMPLES,
    )
    assert loop.run(stop)
    (spike,) = events(tmp_path)
    assert spike["step"] == FIRST_JUDGED + 3
    assert "is over 20 times its usual" in spike["reason"]


def test_goes_back_with_other_noise(tmp_path: Path) -> None:
    """Steps 5 to 7 fail with the first noise only: back to step 4's checkpoint, and through."""
    loop, stop = begin(
        tmp_path,
        "diffusion",
        lambda objective: Ill(objective, frozenset({5, 6, 7}), nan, curable=True),
        "diffusion.guard.patience=3",
        "diffusion.log_every=1",
        NO_SAMPLES,
    )
    assert loop.run(stop)
    found = events(tmp_path)
    assert [(event["step"], event["event"]) for event in found] == [
        *((step, "skipped") for step in (6, 7, 8)),
        (4, "went back"),
    ]
    assert found[-1]["reason"] == "to step 4 with other noise: the loss is nan"
    assert loop.trainer.learner.guard.skipped == 3
    assert loop.trainer.retry == 1
    logged = [line["step"] for line in lines(tmp_path) if "loss" in line]
    assert logged == list(range(1, 13)), "each step once"


@dataclass(frozen=True)
class Spoiling(Ill):
    """Also damages a checkpoint, as a failing disk does, before the first loss that is ill."""

    checkpoint: Path = Path()

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        if step == min(self.at):
            for file in self.checkpoint.glob("*.safetensors"):
                file.write_bytes(b"")
        return super().loss(models, batch, step, streams, turn)


def test_a_damaged_checkpoint_is_named_when_it_goes_back(tmp_path: Path) -> None:
    spoiled = tmp_path / "state" / "step-8"
    loop, stop = begin(
        tmp_path,
        "diffusion",
        lambda objective: Spoiling(objective, frozenset({9, 10, 11}), nan, curable=True, checkpoint=spoiled),
        "diffusion.guard.patience=3",
        NO_SAMPLES,
    )
    assert loop.run(stop)
    assert [(event["step"], event["event"]) for event in events(tmp_path)][-2:] == [(4, "damaged"), (4, "went back")]
    assert "step-8" in events(tmp_path)[-2]["reason"]


def test_gives_up_and_says_what_to_change(tmp_path: Path) -> None:
    loop, stop = begin(
        tmp_path,
        "diffusion",
        lambda objective: Ill(objective, frozenset(range(5, 12)), nan),
        "diffusion.guard.patience=2",
        "diffusion.guard.retries=2",
        NO_SAMPLES,
    )
    with pytest.raises(
        TcmError, match=r"does not recover: the loss is nan, 2 times in a row, even after 2 returns"
    ) as e:
        loop.run(stop)
    assert "step-4; lower learning_rate=0.008, set clip, or look at the data" in str(e.value)
    assert sum(event["event"] == "went back" for event in events(tmp_path)) == 2


def test_no_checkpoint_is_kept_of_a_bad_moment(tmp_path: Path) -> None:
    """At step 8 an interval ends amid skipped updates: the checkpoint to go back to stays that of step 4."""
    loop, stop = begin(
        tmp_path,
        "diffusion",
        lambda objective: Ill(objective, frozenset({6, 7, 8}), nan, curable=True),
        "diffusion.guard.patience=3",
        NO_SAMPLES,
    )
    assert loop.run(stop)
    assert (events(tmp_path)[-1]["event"], events(tmp_path)[-1]["step"]) == ("went back", 4)


def test_guard_off_lets_nan_in_and_resumes(tmp_path: Path) -> None:
    """As asked for; and the checkpoints can still be read."""
    wrap = lambda objective: Ill(objective, frozenset({5}), nan)  # noqa: E731
    loop, stop = begin(tmp_path, "diffusion", wrap, "diffusion.guard.on=false", NO_SAMPLES)
    assert loop.run(stop)
    assert events(tmp_path) == []
    assert not all(bool(torch.isfinite(tensor).all()) for tensor in weights_of(loop).values())
    again, stop = begin(tmp_path, "diffusion", wrap, "diffusion.guard.on=false", NO_SAMPLES)
    assert again.run(stop)

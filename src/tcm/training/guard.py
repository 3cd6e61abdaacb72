"""The guard: an update that would wreck the model is skipped, and training that cannot continue says what to change."""

from dataclasses import dataclass, replace
from math import isfinite
from typing import Literal

from tcm.recipes.stages import GuardSpec

Verdict = Literal["good", "skip", "go back"]

MEMORY = 0.99
"""How slowly the running scale of the gradient norm forgets."""

FIRST_JUDGED = 50
"""Updates until the running scale is trusted to tell a spike."""


@dataclass(frozen=True)
class GuardState:
    """The running scale of the gradient norm, and the updates skipped in a row and in all."""

    scale: float = 0.0
    seen: int = 0
    in_a_row: int = 0
    skipped: int = 0


def judge(limits: GuardSpec, state: GuardState, loss: float, gradient_norm: float) -> tuple[GuardState, Verdict, str]:
    """The state after this step, what to do with the update, and why.

    >>> state, verdict, reason = judge(GuardSpec(), GuardState(), loss=float("nan"), gradient_norm=1.0)
    >>> verdict, reason
    ('skip', 'the loss is nan')
    """
    reason = _objection(limits, state, loss, gradient_norm) if limits.on else ""
    if reason:
        in_a_row = state.in_a_row + 1
        verdict: Verdict = "go back" if in_a_row >= limits.patience else "skip"
        return replace(state, in_a_row=in_a_row, skipped=state.skipped + 1), verdict, reason
    if not isfinite(gradient_norm):  # the guard is off
        return state, "good", ""
    memory = min(MEMORY, state.seen / (state.seen + 1))
    scale = memory * state.scale + (1 - memory) * gradient_norm
    return replace(state, scale=scale, seen=state.seen + 1, in_a_row=0), "good", ""


def _objection(limits: GuardSpec, state: GuardState, loss: float, gradient_norm: float) -> str:
    if not isfinite(loss):
        return f"the loss is {loss}"
    if not isfinite(gradient_norm):
        return f"the gradient norm is {gradient_norm}"
    if state.seen >= FIRST_JUDGED and gradient_norm > limits.spike * state.scale:
        return f"the gradient norm {gradient_norm:.3g} is over {limits.spike:g} times its usual {state.scale:.3g}"
    return ""

"""What each stage minimises: diffusion, consistency, truncated consistency. TCM Eq. 4–11, Algorithm 1.

Every objective keeps drawing (t, ε, masks) apart from computing with what was drawn (`loss_at`).
"""

from tcm.method.objectives.base import Batch, Draw, Losses, Models, Objective, Trajectory, draw
from tcm.method.objectives.consistency import Consistency, Distillation, Pairs, f_trunc
from tcm.method.objectives.diffusion import Diffusion
from tcm.method.objectives.tangents import Tangents
from tcm.method.objectives.truncated import TruncatedConsistency

__all__ = [
    "Batch",
    "Consistency",
    "Diffusion",
    "Distillation",
    "Draw",
    "Losses",
    "Models",
    "Objective",
    "Pairs",
    "Tangents",
    "Trajectory",
    "TruncatedConsistency",
    "draw",
    "f_trunc",
]

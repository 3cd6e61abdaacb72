"""A small study, really trained and measured: three variants with two seeds, and a fourth that fails."""

from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from tcm.foundation.errors import Diverged, TcmError
from tcm.foundation.processes import Processes
from tcm.foundation.progress import PrintedProgress
from tcm.foundation.signals import StopRequest
from tcm.studies.common_stages import shared_stages, stage_key
from tcm.studies.folders import Failure, note_failure, prepare, run_folder, stage_folder
from tcm.studies.measuring import measure_variant
from tcm.studies.resolve import resolve_study
from tcm.studies.running import all_variants
from tcm.training.run import Run

NEVER = StopRequest(patient=True)
STUDY = """
title = "Where to truncate <small>"
question = "Which t' gives the best one-step model?"
claim = "t' = 1 is better than t' = 4."
where = "Table 4"
base = "digits"
seeds = [0, 1]
reference = "t' = 1"
overrides = [
    "network.channels=8", "network.channel_mult=[1]", "network.blocks=1", "adapts=false", "consistency.curriculum.d=4",
    "diffusion.warmup=1", "diffusion.steps=4", "diffusion.batch=16", "diffusion.sample_every=0",
    "consistency.steps=4", "consistency.batch=16", "consistency.log_every=1", "consistency.sample_every=0",
    "truncated.steps=4", "truncated.batch=16", "truncated.log_every=1", "truncated.sample_every=0",
    "truncated.checkpoint_every=2", "truncated.keep=9",
]

[variants]
"t' = 4" = ["truncated.t_prime=4.0"]
"t' = 1" = []
"stage 1" = { stage = "consistency" }
"too fast" = ["truncated.learning_rate=1e30", "truncated.guard={patience=1, retries=0}"]

[measure]
count = 80
dfid = [0.2, 5.0]
curve = ["truncated"]
curve_count = 80
gradients = true

[expects]
better = "t' = 1"
than = ["t' = 4"]
by = "fid, 1 step"

[paper]
columns = ["FID, 1 step", "FID, 2 steps"]
rows = { "t' = 4" = [2.98, "none"], "t' = 1" = [2.46, 2.05], "teacher" = [1.97, "35 steps"] }
note = "CIFAR-10, DDPM++"
"""


def make_study(folder: Path) -> None:
    (folder / "small.toml").write_text(STUDY)
    study, out = resolve_study(folder / "small.toml"), folder / "out"
    variants = all_variants(study)
    stages = shared_stages(study, variants)
    prepare(study, variants, stages.values(), out)
    errors: dict[str, TcmError] = {}
    for key, stage in stages.items():
        run = Run(stage.recipe, stage_folder(out, key), Processes(torch.device("cpu")), Console(quiet=True))
        try:
            run.train_only(stage.name, partial(PrintedProgress, Console(quiet=True)), NEVER)
        except TcmError as error:
            errors[key] = error
    for variant in variants:
        run, key = run_folder(out, variant), stage_key(variant.recipe, variant.stage)
        if key in errors:
            diverged = isinstance(errors[key], Diverged)
            note_failure(run, Failure(stage=variant.stage, error=str(errors[key]), diverged=diverged))
        else:
            measure_variant(study, variant, run, ignore, NEVER)


def ignore(message: object) -> None:
    """Hear a measurement's progress."""

"""`tcm sample`: images from a model."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tcm.cli.flags import ModelName
from tcm.foundation.errors import TcmError

if TYPE_CHECKING:
    from tcm.evaluation.generation import Sampling
    from tcm.foundation.processes import Processes
    from tcm.weights import Model

SamplingPrecision = Literal["fp32", "bf16"]
STEPS_HELP = (
    "Sampling steps. A diffusion model follows its ODE with Heun's method: two evaluations of the network per step."
)
Steps = Annotated[int | None, typer.Option(min=1, help=STEPS_HELP)]
TimesOption = Annotated[str | None, typer.Option(help="Sampling times instead of steps, such as 80,1.")]
ClassOption = Annotated[str | None, typer.Option("--class", help="Draw this class only: its name or number.")]
Guidance = Annotated[
    float | None, typer.Option(min=0, help="Classifier-free guidance of a diffusion model; 1 is none.")
]
Negative = Annotated[str | None, typer.Option(help="The prompt that guidance steers away from. [the empty one]")]
Batch = Annotated[int, typer.Option(min=1, help="Batch size; does not change the images.")]
Device = Annotated[str | None, typer.Option(help="Such as cpu. [the accelerator, if there is one]")]


def sample(
    model: ModelName,
    count: Annotated[
        int | None,
        typer.Option(
            "-n", "--count", min=1, help="How many images, or how many for each prompt. [16; 4 for each prompt]"
        ),
    ] = None,
    steps: Steps = None,
    times: TimesOption = None,
    seed: Annotated[int, typer.Option(min=0, help="The first image's seed.")] = 0,
    seeds: Annotated[str | None, typer.Option(help="Which seeds to draw, such as 0-63.")] = None,
    choice: ClassOption = None,
    prompt: Annotated[list[str] | None, typer.Option(help="Draw this text; may be repeated.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file of prompts: one per line, a JSON list, or COCO's captions.")
    ] = None,
    guidance: Guidance = None,
    negative: Negative = None,
    out: Annotated[Path, typer.Option(help="A folder, or a file: .png (grid), .npz, .zip.")] = Path("samples.png"),
    batch: Annotated[
        int | None, typer.Option(min=1, help="Batch size; does not change the images. [what fits in memory]")
    ] = None,
    device: Device = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the images in an existing folder, .npz or .zip.")
    ] = False,
    precision: Annotated[SamplingPrecision, typer.Option(help="bf16 is faster if the device supports it.")] = "fp32",
) -> None:
    """Draw images. A seed always gives the same image, whatever the batch size, processes or output format."""
    from rich.console import Console

    from tcm.evaluation.generation import generate, parse_seeds
    from tcm.evaluation.output import check_output, check_room, write_samples
    from tcm.evaluation.prompts import draw, prompted
    from tcm.evaluation.sharing import share
    from tcm.foundation.counting import counter
    from tcm.foundation.processes import join
    from tcm.weights import load

    check_output(out)
    if seeds is not None and count is not None:
        raise TcmError(f"-n {count} and --seeds {seeds} both say how many images; give one of them")
    texts = prompts_of(prompt, prompts)
    if texts and choice is not None:
        raise TcmError(f"--class {choice} and prompts cannot both be given; give one of them")
    usual = 4 if texts else 16
    chosen = parse_seeds(seeds) if seeds is not None else list(range(seed, seed + (count or usual)))
    wanted = prompted(texts, chosen) if texts else None
    chosen = chosen if wanted is None else [one.seed for one in wanted]
    if wanted is None and negative is not None:
        raise TcmError(f"--negative {negative!r} needs a prompt; give --prompt or --prompts")
    sampling = sampling_of(steps, times, choice, precision)
    with join(device) as processes:
        with processes.agreeing():
            loaded = load(model_of(model, processes)).to(processes.device)
            loaded = loaded if guidance is None else loaded.guided(guidance)
            if processes.first:
                check_room(out, overwrite)
                if wanted is None and choice is None:
                    _say_prompts(loaded)
        own = share(processes, chosen)
        start = time.perf_counter()
        drawn = (
            generate(loaded, own, sampling, batch)
            if wanted is None
            else draw(loaded, share(processes, wanted), sampling, negative, batch)
        )
        images = counter(processes)(drawn, len(own), "sampling")
        write_samples(out, images, chosen, loaded.card.picture_shape, processes, wanted)
        if processes.first:
            speed = len(chosen) / (time.perf_counter() - start)
            described = sampling.describe(loaded)
            Console().print(f"{len(chosen)} images ({described}) in {out}, {speed:.1f} images/s", highlight=False)


def _say_prompts(model: Model) -> None:
    """Say what a text model draws if it is given no prompt."""
    from tcm.text.condition import Texts

    kind = model.card.condition
    if isinstance(kind, Texts):
        own = ", ".join(repr(prompt) for prompt in kind.prompts)
        drawn = f"each image uses one of the model's own prompts: {own}" if own else "all images use the empty prompt"
        typer.echo(f"without --prompt or --prompts, {drawn}", err=True)


def prompts_of(prompt: list[str] | None, file: Path | None) -> list[str]:
    """The prompts that were given one by one, then those of a file."""
    from tcm.evaluation.prompts import read_prompts

    return [*(prompt or []), *(read_prompts(file) if file is not None else [])]


def model_of(given: str, processes: Processes | None = None) -> str:
    """The model that is meant: a stage's, or of a run's folder that of the last finished stage, which a line says."""
    from tcm.recipes.folders import run_of
    from tcm.weights import is_run, last_model

    if not is_run(Path(given)):
        stage = run_of(Path(given)) is not None and (Path(given) / "model").is_dir()
        return str(Path(given) / "model") if stage else given
    found = last_model(Path(given))
    if processes is None or processes.first:
        typer.echo(f"{given}: using {found.parent.name}, the last finished stage", err=True)
    return str(found)


def sampling_of(
    steps: int | None, times: str | None, choice: str | None, precision: SamplingPrecision = "fp32"
) -> Sampling:
    """The options as one value."""
    from tcm.evaluation.generation import Sampling, parse_times

    if steps is not None and times is not None:
        raise TcmError(f"--steps {steps} and --times {times} both set the sampling times; give one of them")
    return Sampling(steps, None if times is None else parse_times(times), choice, precision)

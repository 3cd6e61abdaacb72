"""A pixel model as a diffusers pipeline: in memory, or as a folder that needs diffusers and torch alone."""

import copy
import json
import math
import sys
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tcm.foundation.devices import fp32_products
from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install
from tcm.foundation.files import new_folder
from tcm.method.conditions import Classes, Labels
from tcm.method.preconditioning import USUAL
from tcm.networks.layers import class_count
from tcm.weights.card import ModelCard
from tcm.weights.model import Model
from tcm.weights.standalone_source import standalone_source

if TYPE_CHECKING:
    from diffusers import ConsistencyModelPipeline

BOUND = 1e-4
"""The largest difference from torch, in images of [−1, 1], at which a folder is written."""
COMPARED = 3
"""Images that are compared with torch's."""

HEADER = """\
# Copyright 2026 the truncated-consistency authors. SPDX-License-Identifier: Apache-2.0
# This model's network for diffusers, with all that it uses of truncated-consistency {version}. Python 3.11 or later.
"""
BUILDER = '''

def build_network(values: dict[str, Any], image_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The network of a config's values."""
    from types import SimpleNamespace

    return {network}(SimpleNamespace(**values), image_shape, classes)
'''

README = """\
# {title}

A {kind} model for diffusers: {shape} images, {condition}. It makes an image in one or two steps.

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{title}", trust_remote_code=True)
image = pipeline({call}num_inference_steps=1).images[0]
```

`trust_remote_code` lets diffusers run `unet/{module}.py`, which holds the network: diffusers has no such layers of its
own. The pipeline and the scheduler are diffusers' own. The first step is at t = {t_max:g}; with
`num_inference_steps=2` the second is at t = {second:g}. {labels}

You need Python 3.11 or later, torch, diffusers and safetensors.

Licence of the weights: {licence}. Licence of the code in `unet/`: Apache-2.0.
"""


def diffusers_pipeline(model: Model) -> "ConsistencyModelPipeline":
    """The model as diffusers' own `ConsistencyModelPipeline`, with our network as its `unet`.

    >>> pipeline = diffusers_pipeline(tcm.load("digits"))  # doctest: +SKIP
    >>> image = pipeline(class_labels=7, num_inference_steps=1).images[0]  # doctest: +SKIP
    """
    try:
        from diffusers import CMStochasticIterativeScheduler, ConsistencyModelPipeline

        from tcm.weights.diffusers_unet import ConsistencyUNet
    except ImportError as error:
        raise TcmError(f"diffusers pipelines need more packages; {how_to_install('t2i')}") from error
    card = model.card
    channels, size, _ = _checked(card)
    unet = ConsistencyUNet(
        network_config=card.network.model_dump(mode="json"),
        sample_size=size,
        in_channels=channels,
        out_channels=channels,
        num_class_embeds=class_count(card.condition) or None,
        t_min=card.t_min,
    )
    unet.network.load_state_dict(model.denoiser.network.state_dict())
    # With three grid times from T to 0, two steps take the first and the middle one, which ρ puts at the second time.
    scheduler = CMStochasticIterativeScheduler(
        num_train_timesteps=3,
        sigma_min=0.0,
        sigma_max=card.t_max,
        sigma_data=card.sigma_data,
        rho=math.log2(card.t_max / _second_time(model)),
        clip_denoised=False,
    )
    return ConsistencyModelPipeline(unet=unet.eval(), scheduler=scheduler)


def export_diffusers(model: Model, out: Path) -> float:
    """Write a folder that `DiffusionPipeline.from_pretrained(out, trust_remote_code=True)` reads, without this package.

    The pipeline is diffusers' own; the network's source, ours, lies in the folder. Returns the largest difference of
    the folder's images from torch's; more than `BOUND` is an error, and then nothing is written.
    """
    if out.exists():
        raise TcmError(f"--out={out} exists; name a new folder")
    pipeline = diffusers_pipeline(model)
    if not model.card.network.builds_from_values:
        raise TcmError(
            f"network.kind={model.card.network.kind!r} cannot be built without its package; use diffusers_pipeline in "
            "Python, where the package is installed"
        )
    with new_folder(out) as folder:
        pipeline.save_pretrained(folder)
        module = f"{type(model.denoiser.network).__name__.lower()}_unet"
        (folder / "unet" / f"{module}.py").write_text(network_source(model))
        index = json.loads((folder / "model_index.json").read_text("utf-8"))
        index["unet"] = [module, "ConsistencyUNet"]
        (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
        (folder / "README.md").write_text(readme(model, out.name, module))
        return _difference(folder, module, Model(copy.deepcopy(model.denoiser).cpu(), model.card))


def exports_to_diffusers(model: Model) -> bool:
    """Whether `export_diffusers` can write this model."""
    try:
        _checked(model.card)
        _second_time(model)
    except TcmError:
        return False
    return model.card.network.builds_from_values


def network_source(model: Model) -> str:
    """The source of the pipeline's `unet`, as one module that needs torch and diffusers alone."""
    from tcm.weights.diffusers_unet import ConsistencyUNet

    network = type(model.denoiser.network)
    source = standalone_source(network, ConsistencyUNet, without=frozenset({"build_network"}))
    return HEADER.format(version=version("truncated-consistency")) + source + BUILDER.format(network=network.__name__)


def readme(model: Model, name: str, module: str) -> str:
    """How to use the folder."""
    card = model.card
    classes = class_count(card.condition)
    return README.format(
        title=name,
        kind=card.kind,
        shape="×".join(map(str, card.image_shape)),
        condition=card.condition or "unconditional",
        call="class_labels=0, " if classes else "",
        module=module,
        t_max=card.t_max,
        second=_second_time(model),
        labels=f"`class_labels` are numbers from 0 to {classes - 1}." if classes else "",
        licence=card.provenance.licence or "not stated",
    )


def _second_time(model: Model) -> float:
    times = model.sampler.times(model.denoiser, 2)
    if times is None:
        raise TcmError(
            f"a {model.sampler.model} model cannot be exported to diffusers, whose ConsistencyModelPipeline takes one "
            "step or two; export the model of a later stage"
        )
    return times[1]


def _checked(card: ModelCard) -> tuple[int, int, int]:
    """The shape of the images, if diffusers' pipeline can make them."""
    card.check_alone("a pipeline")
    channels, height, width = card.image_shape
    if height != width:
        raise TcmError(f"image_shape={card.image_shape} is not square, but diffusers' pipeline makes square images")
    if card.preconditioning != USUAL:
        raise TcmError(
            f"preconditioning={card.preconditioning} cannot be exported: diffusers' scheduler has EDM's; train with "
            'preconditioning = { kind = "edm" }'
        )
    if not isinstance(card.condition, Classes | None):
        raise TcmError(
            f"a model of {card.condition} cannot be exported to diffusers, whose ConsistencyModelPipeline takes classes"
        )
    return channels, height, width


@fp32_products("ieee")
@torch.no_grad()
def _difference(folder: Path, module: str, model: Model) -> float:
    """The largest difference between the folder's images and torch's, with one step and two; an error above `BOUND`."""
    pipeline = _pipeline_in(folder, module)
    labels = None if model.card.condition is None else model.card.condition.dummy(COMPARED)
    shape = (COMPARED, *model.card.image_shape)
    differences = []
    for steps in (1, 2):
        samples: list[Tensor] = []
        pipeline(
            batch_size=COMPARED,
            class_labels=labels.index if isinstance(labels, Labels) else None,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(0),
            callback=lambda step, t, sample, into=samples: into.append(sample),
        )
        noise = torch.Generator().manual_seed(0)
        x = torch.zeros(shape)
        for t in model.sampler.times(model.denoiser, steps) or ():
            x = model.denoiser(x + t * torch.randn(shape, generator=noise), torch.full((COMPARED,), t), labels)
        differences.append(float((samples[-1] - x).abs().max()))
    if not max(differences) <= BOUND:
        raise TcmError(
            f"the pipeline differs from torch by {max(differences):.3g}, more than {BOUND:g}; nothing was written. "
            "Please report this, with the versions of torch and diffusers"
        )
    return max(differences)


def _pipeline_in(folder: Path, module: str) -> "ConsistencyModelPipeline":
    """The pipeline that diffusers makes of the folder, without the copy of its code that diffusers keeps."""
    from diffusers import CMStochasticIterativeScheduler, ConsistencyModelPipeline

    spec = spec_from_file_location(f"tcm_exported_{module}", folder / "unet" / f"{module}.py")
    assert spec is not None
    assert spec.loader is not None
    code = module_from_spec(spec)
    sys.modules[spec.name] = code  # where dataclasses look for their module
    try:
        spec.loader.exec_module(code)
    finally:
        del sys.modules[spec.name]
    pipeline = ConsistencyModelPipeline(
        unet=code.ConsistencyUNet.from_pretrained(folder / "unet"),
        scheduler=CMStochasticIterativeScheduler.from_pretrained(folder / "scheduler"),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline

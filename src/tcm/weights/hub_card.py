"""The README.md of a model on the Hugging Face hub: what it is, how to use it, how it was made, how good it is."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from huggingface_hub import EvalResult, ModelCardData

from tcm.method.conditions import ConditionKind
from tcm.weights.diffusers_export import exports_to_diffusers
from tcm.weights.importing import parameter_count
from tcm.weights.model import Model

TASK = "unconditional-image-generation"
"""The hub's name for what these models do, with classes too."""
SAMPLES_FILE = "samples.png"
EXAMPLES = 20
"""Conditions that a card names."""
KNOWN_LICENCES = (
    *("apache-2.0", "mit", "bsd-3-clause", "gpl-3.0", "openrail", "cc0-1.0", "unknown"),
    *("cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0"),
)
"""Those that the hub knows by these names and that a model may well have; any other is `other`, with its name."""
ABSOLUTE_PATH = re.compile(r'"(?:/|~|[A-Za-z]:[/\\])[^"]*?([^"/\\]+)[/\\]*"')


@dataclass(frozen=True)
class CardScore:
    """A score with its conditions, in words; `kind` is the hub's name of the metric."""

    kind: str
    metric: str
    value: float
    deviation: float | None
    sampling: str
    images: int
    reference: str
    reference_images: int | None
    detector: str


CARD = """\
---
{metadata}
---

# {name}

{summary}

{samples}
## Use

With the Python package `truncated-consistency`:

```python
import tcm

model = tcm.load("{repository}")
images = model.sample(16, steps={steps}, seed=0)  # about [−1, 1]; a seed always gives the same image
```

```sh
tcm sample {repository} -n 16 --out samples.png
```
{diffusers}
As ONNX graphs, for any runtime:

```sh
tcm export {repository} --to onnx --out {name}-onnx
```

## Model

| | |
| --- | --- |
{facts}

## Training

{training}

## Scores

{scores}

## Licence

{licence}
"""

DIFFUSERS = """
In diffusers, as a `ConsistencyModelPipeline`; the exported folder works without `truncated-consistency`:

```sh
tcm export {repository} --to diffusers --out {name}-diffusers
```

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{name}-diffusers", trust_remote_code=True)
image = pipeline({labels}num_inference_steps=1).images[0]
```
"""

SAMPLES = """\
![{count} images]({file})

{count} images ({sampling}), seeds 0 to {last}, not selected.
"""


def card_text(
    model: Model, repository: str, *, scores: Sequence[CardScore] = (), recipe: str | None = None, pictures: int = 0
) -> str:
    """The README.md of a model at `repository`, such as someone/name.

    `recipe` is the text of the run's recipe.toml; `pictures` is the number of images in samples.png, 0 for no picture.
    """
    card = model.card
    name = repository.rpartition("/")[2]
    own = {"repository": repository, "name": name}
    return CARD.format(
        **own,
        metadata=front_matter(model, name, scores),
        summary=plain(_summary(model)),
        samples=_samples(model, pictures),
        steps=card.sampler.usual_steps[0],
        diffusers=DIFFUSERS.format(**own, labels=_labels(model)) if exports_to_diffusers(model) else "",
        facts="\n".join(f"| {key} | {plain(value)} |" for key, value in _facts(model).items()),
        training=_training(model, recipe),
        scores=_score_table(scores),
        licence=plain(card.provenance.licence or "Not stated."),
    )


def plain(text: object) -> str:
    """What others wrote, such as a class's name, as one line that is text and nothing else in Markdown.

    >>> plain("a | <b>\\n`c`")
    'a &#124; &#60;b&#62; &#96;c&#96;'
    """
    return re.sub(r"[\\`|<>\[\]&]", lambda found: f"&#{ord(found[0])};", " ".join(str(text).split()))


def front_matter(model: Model, name: str, scores: Sequence[CardScore]) -> str:
    """What the hub reads of the card, as YAML."""
    stated = model.card.provenance.licence or "unknown"
    identifier = stated.partition(":")[0].strip().lower().replace(" ", "-")
    known = identifier in KNOWN_LICENCES
    return ModelCardData(
        library_name=model.card.library,
        license=identifier if known else "other",
        license_name=None if known else stated,
        pipeline_tag=TASK,
        tags=[model.card.kind, f"{model.card.sampler.model}-model", "image-generation"],
        model_name=name,
        eval_results=[_result(score) for score in scores] or None,
    ).to_yaml()


def _result(score: CardScore) -> EvalResult:
    return EvalResult(
        task_type=TASK,
        dataset_type=score.reference,
        dataset_name=score.reference,
        metric_type=score.kind,
        metric_name=f"{score.metric}, {score.sampling}",
        metric_value=score.value,
        metric_args={"images": score.images, "detector": score.detector, "deviation": score.deviation},
    )


def _summary(model: Model) -> str:
    card = model.card
    at_once = "One evaluation of its network makes an image." if card.sampler.generates_at_once else ""
    what = f"{card.condition}" if card.condition else "unconditional"
    return f"A {card.kind} model of {_shape(model)} images, {what}. {at_once}".strip()


def _samples(model: Model, count: int) -> str:
    if not count:
        return ""
    sampling = model.card.sampler.describe(model.denoiser, None, None)
    return SAMPLES.format(count=count, file=SAMPLES_FILE, sampling=sampling, last=count - 1)


def _shape(model: Model) -> str:
    return "×".join(map(str, model.card.image_shape))


def _labels(model: Model) -> str:
    return "" if model.card.condition is None else "class_labels=0, "


def _facts(model: Model) -> dict[str, str]:
    card = model.card
    parameters = sum(parameter.numel() for parameter in model.denoiser.parameters())
    condition = {} if card.condition is None else {"conditions": _conditions(card.condition)}
    return {
        "method": card.kind,
        "network": f"{card.network.kind}, {parameter_count(parameters)} parameters",
        "images": f"{_shape(model)}, {card.condition or 'unconditional'}",
        "times": f"defined from t = {card.t_min:g} to {card.t_max:g}; sigma_data {card.sigma_data:g}",
        "sampling": "; ".join(card.sampler.describe(model.denoiser, steps, None) for steps in card.sampler.usual_steps),
    } | condition


def _conditions(kind: ConditionKind) -> str:
    """A few of them, in words."""
    captions = kind.captions(kind.examples(EXAMPLES))
    return ", ".join(captions) + (", …" if len(captions) == EXAMPLES else "")


def _training(model: Model, recipe: str | None) -> str:
    came = model.card.provenance
    told = {
        "imported from": came.imported_from,
        "recipe": came.recipe,
        "stage": came.stage,
        "step": came.step,
        "training data (SHA-256)": came.data,
    }
    lines = [f"- {key}: {plain(value)}" for key, value in told.items() if value is not None]
    text = "\n".join(lines) or "Not stated."
    if recipe is not None:
        # An absolute path says more of its owner's machine than a reader needs: its last part is kept.
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe)), default=0))
        text += f"\n\nThe whole recipe:\n\n{fence}toml\n{ABSOLUTE_PATH.sub(shorter_path, recipe).strip()}\n{fence}"
    return text


def shorter_path(found: re.Match[str]) -> str:
    """An absolute path in quotes, as its last part."""
    return f'"{found[1]}"'


def _score_table(scores: Sequence[CardScore]) -> str:
    if not scores:
        return "Not measured."
    head = "| metric | value | sampling | images | reference | features |\n| --- | --- | --- | --- | --- | --- |"
    rows = [
        f"| {plain(score.metric)} | {score.value:.4g}{'' if score.deviation is None else f' ± {score.deviation:.2g}'} "
        f"| {plain(score.sampling)} | {score.images:,} | {plain(_reference(score))} | {plain(score.detector)} |"
        for score in scores
    ]
    return "\n".join([head, *rows])


def _reference(score: CardScore) -> str:
    return score.reference + ("" if score.reference_images is None else f" ({score.reference_images:,} images)")

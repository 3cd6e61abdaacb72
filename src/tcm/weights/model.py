"""A model: a denoiser that knows its method, saved as a folder with config.json and model.safetensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import save_file
from torch import Tensor

from tcm.foundation.devices import fp32_products
from tcm.foundation.errors import TcmError
from tcm.foundation.files import new_folder
from tcm.foundation.plugins import Trust
from tcm.foundation.randomness import SampleStreams
from tcm.foundation.tensors import bounded_by, check_tensors, load_tensors, shapes_in, tensors_in
from tcm.method.conditions import Condition, ConditionChoice
from tcm.method.joined import Joined
from tcm.method.preconditioning import Denoiser, Uncertainty
from tcm.method.sampling import Sampler, last
from tcm.weights.card import COMPANION_FILE, CONFIG_FILE, FILES, WEIGHTS_FILE, ModelCard, read_card


@dataclass(frozen=True)
class Model:
    """A denoiser and its card.

    >>> import tcm
    >>> card = tcm.ModelCard(kind="consistency", network=tcm.DDPMppConfig(channels=8, channel_mult=(1,), blocks=1),
    ...                      image_shape=(1, 8, 8))
    >>> tcm.Model.fresh(card).sample(4, steps=2, seed=0).shape
    torch.Size([4, 1, 8, 8])
    """

    denoiser: Denoiser
    card: ModelCard

    @classmethod
    def fresh(cls, card: ModelCard) -> Self:
        """A model with newly initialised weights, those of its companion too."""
        if card.companion is not None:
            return cls.fresh(card.alone).joined(cls.fresh(card.companion))
        denoiser = Denoiser(
            card.network.build(card.image_shape, card.condition),
            card.image_shape,
            card.condition,
            sigma_data=card.sigma_data,
            t_min=card.t_min,
            t_max=card.t_max,
            uncertainty=Uncertainty(card.uncertainty) if card.uncertainty else None,
            preconditioning=card.preconditioning,
        )
        return cls(denoiser, card)

    @classmethod
    def load(cls, path: str | Path, trust: Trust = False) -> Self:
        """The model in a folder; nothing in it is executed."""
        folder = Path(path)
        card = read_card(folder / CONFIG_FILE, trust)
        model = cls._part(card.alone, folder / WEIGHTS_FILE)
        return model if card.companion is None else model.joined(cls._part(card.companion, folder / COMPANION_FILE))

    @classmethod
    def inspect(cls, path: str | Path) -> ModelCard:
        """The card of the model in a folder, whose weights are whole and fit it; they are not read into memory."""
        folder = Path(path)
        card = read_card(folder / CONFIG_FILE)
        for part, name in ((card.alone, WEIGHTS_FILE), (card.companion, COMPANION_FILE)):
            if part is not None:
                cls._part(part, folder / name, read=False)
        return card

    @classmethod
    def _part(cls, card: ModelCard, weights: Path, *, read: bool = True) -> Self:
        """One network with its weights; on the meta device, and only compared with them, if they are not to be read."""
        shapes = shapes_in(weights)
        with bounded_by(shapes.values(), str(weights.with_name(CONFIG_FILE))), torch.device("meta"):
            model = cls.fresh(card)
        check_tensors(model.denoiser, shapes, str(weights))
        if read:
            load_tensors(model.denoiser, tensors_in(weights), str(weights))
        return model

    def save(self, path: str | Path, *, half: bool = False) -> None:
        """Write config.json, model.safetensors and, if the model has a companion, companion.safetensors into a folder,
        which appears whole or not at all.

        `half` stores matrices and filters in float16, in about half the bytes; they are computed with in float32 all
        the same. A model that is there already is replaced; a folder that holds anything else is refused.
        """
        _check_replaceable(Path(path))
        with new_folder(Path(path)) as folder:
            self.write_files(folder, half=half)

    def write_files(self, folder: Path, *, half: bool = False) -> None:
        """Write config.json, model.safetensors and a companion's weights into a folder that is there."""
        _write(self.alone.denoiser, folder / WEIGHTS_FILE, half)
        if isinstance(self.denoiser, Joined):
            _write(self.denoiser.companion, folder / COMPANION_FILE, half)
        (folder / CONFIG_FILE).write_text(self.card.model_dump_json(indent=2) + "\n")

    @classmethod
    def from_pretrained(cls, name: str | Path, trust: Trust = False) -> Self:
        """The model in a folder, or on the Hugging Face hub: `tcm.load` under the hub's usual name."""
        from tcm.weights import find

        return cls.load(find(name), trust)

    def save_pretrained(self, path: str | Path) -> None:
        """`save` under the hub's usual name."""
        self.save(path)

    def push_to_hub(
        self, repository: str, *, private: bool = False, token: str | None = None, licence: str | None = None
    ) -> str:
        """Upload the model with a card and a picture of samples; returns its address. `tcm push` also adds scores."""
        from tcm.weights.hub import HubFolder, push

        return push(HubFolder(self, repository, licence=licence), private=private, token=token)

    def __repr__(self) -> str:
        card, came = self.card, self.card.provenance
        shape = "×".join(map(str, card.image_shape))
        origin = came.imported_from or " of ".join(part for part in (came.stage, came.recipe) if part) or "unknown"
        return (
            f"Model: {card.kind}, {shape} images, {card.condition or 'unconditional'}\n"
            f"  network: {card.network.kind}, {self.parameters:,} parameters\n"
            f"  times: {card.t_min:g} to {card.t_max:g}, sigma_data {card.sigma_data:g}\n"
            f"  sampler: {card.sampler.describe(self.denoiser, None, None)} by default\n"
            f"  from: {origin}"
            + (f"\n  companion: {low.kind}, times {low.t_min:g} to {card.t_min:g}" if (low := card.companion) else "")
        )

    @property
    def parameters(self) -> int:
        """The parameters of its own network, without its companion's."""
        return sum(parameter.numel() for parameter in self.alone.denoiser.parameters())

    @property
    def alone(self) -> Self:
        """The model without its companion, with the same weights."""
        if not isinstance(self.denoiser, Joined):
            return self
        return type(self)(self.denoiser.alone, self.card.alone)

    def joined(self, companion: Self) -> Self:
        """The model with a companion, a consistency model that takes over at t_min and below."""
        card = ModelCard.model_validate(dict(self.card.alone) | {"companion": companion.card})
        return type(self)(Joined(self.alone.denoiser, companion.denoiser), card)

    def to(self, device: torch.device | str) -> Self:
        """Move the weights; returns this model."""
        self.denoiser.to(device)
        return self

    @property
    def sampler(self) -> Sampler:
        """How the model is sampled."""
        return self.card.sampler

    @fp32_products("ieee")
    def sample(
        self,
        count: int | None = None,
        *,
        steps: int | None = None,
        times: Sequence[float] | None = None,
        seed: int = 0,
        seeds: Sequence[int] | None = None,
        labels: ConditionChoice | None = None,
        prompts: str | Sequence[str] | None = None,
        negative: str | None = None,
        condition: Condition | None = None,
        batch: int = 64,
    ) -> Tensor:
        """Images of black −1 and white 1, (count, C, H, W): image i is a function of seed + i (or seeds[i]) and its
        condition alone. Pixels are what the network makes, which can lie a little beyond; `to_uint8` clamps them.

        A consistency model takes `steps` (1 by default) or the `times` themselves; a diffusion model takes `steps`
        (18 by default) of Heun's method. `labels` are classes by number or name, `prompts` are texts, one for all
        images or one for each; a `condition` is a value as the network takes it. Without any, each image's condition is
        drawn from its seed. Guidance (`guided`) steers away from the `negative` prompt, or from the empty one.
        """
        if labels is not None and prompts is not None:
            raise TcmError(f"labels={labels} and prompts={prompts} cannot both be given; give one of them")
        kind = self.card.condition
        if prompts is not None and (kind is None or not kind.takes_prompts):
            raise TcmError(
                f"prompts={prompts!r} given, but this model takes {kind or 'no condition'}; leave prompts out"
            )
        if count is None and seeds is None and prompts is not None and not isinstance(prompts, str):
            count = len(prompts)
        if seeds is not None and count is not None and count != len(seeds):
            raise TcmError(f"count={count} does not match the {len(seeds)} seeds; give only one of them")
        if steps is not None and times is not None:
            raise TcmError(f"steps={steps} and times={list(times)} cannot both be given; give one of them")
        for name, number in (("count", count), ("batch", batch)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise TcmError(f"{name}={number!r} must be a whole number of at least 1")
        seeds = list(seeds) if seeds is not None else list(range(seed, seed + (1 if count is None else count)))
        condition = self._condition(seeds, labels if prompts is None else prompts, condition)
        condition = self._with_negative(condition, negative)
        device = next(self.denoiser.parameters()).device
        parts = []
        for start in range(0, len(seeds), batch):
            rows = slice(start, start + batch)
            some = None if condition is None else condition.select(rows).to(device)
            steps_ = self.sampler.run(self.denoiser, SampleStreams(seeds[rows]), some, steps=steps, times=times)
            parts.append(self.pictures(last(steps_)).cpu())
        return torch.cat(parts) if parts else torch.empty(0, *self.card.picture_shape)

    def pictures(self, x: Tensor) -> Tensor:
        """The images of what the network makes: itself, or decoded latents, which lie in [−1, 1]."""
        return x if self.card.latents is None else self.card.latents.decode(x)

    def guided(self, scale: float) -> Self:
        """The same model, sampled with classifier-free guidance of this scale; only diffusion models can be."""
        return replace(self, card=self.card.model_copy(update={"sampler": self.sampler.guided(scale)}))

    def _with_negative(self, condition: Condition | None, negative: str | None) -> Condition | None:
        if negative is None:
            return condition
        if condition is None or self.card.condition is None:
            raise TcmError(f"negative={negative!r} given, but this model is unconditional; leave negative out")
        changed = self.card.condition.with_negative(condition, negative)
        if not self.sampler.uses_null:
            raise TcmError(
                f"negative={negative!r} has no effect on a {self.sampler.model} model that is sampled without "
                "guidance; leave it out, or guide a diffusion model, as with guided(4.0) or --guidance 4"
            )
        return changed

    def _condition(self, seeds: list[int], labels: ConditionChoice | None, given: Condition | None) -> Condition | None:
        kind = self.card.condition
        if labels is not None and given is not None:
            raise TcmError(f"labels={labels} and a condition cannot both be given; give one of them")
        if kind is None:
            if labels is not None:
                raise TcmError(f"labels={labels!r} given, but this model is unconditional; leave labels out")
            if given is not None:
                raise TcmError("condition given, but this model is unconditional; leave condition out")
            return None
        if given is None:
            return kind.draw(seeds) if labels is None else kind.choose(labels, len(seeds))
        if len(given) != len(seeds):
            raise TcmError(f"condition has {len(given)} entries for {len(seeds)} images; give one per image")
        if not kind.takes(given):
            raise TcmError(f"this model takes {kind}, but the condition is something else; give {kind}")
        return given


def _write(denoiser: Denoiser, file: Path, half: bool) -> None:
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in denoiser.state_dict().items()}
    if half:
        tensors = {name: tensor.half() if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _check_replaceable(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise TcmError(f"{path} is a file; give a folder to save the model in")
    others = [file.name for file in path.iterdir() if file.name not in FILES] if path.exists() else []
    if others:
        raise TcmError(f"{path} holds {min(others)}, which saving a model there would delete; give another folder")

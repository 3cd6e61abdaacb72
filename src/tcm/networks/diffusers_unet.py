"""Stable Diffusion's UNet, as diffusers computes it: 859.5 M parameters with the defaults, those of version 1.5.

Its own times are integers 0, …, 999 with noise levels σ = √((1 − ᾱ)/ᾱ) from 0.0292 to 14.6146, and its data has unit
variance. With sigma_data = 1 and t_max = 14.6146 our denoiser around it is the pipeline's prediction.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt
from torch import Tensor, nn

from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install
from tcm.method.conditions import Condition, ConditionKind, TextEmbeddings
from tcm.method.preconditioning import Masks, Network
from tcm.method.sampling import Sampler
from tcm.networks.base import Blocks, ImageShape, NetworkConfig
from tcm.text.condition import Texts

DOWN, DOWN_PLAIN, UP, UP_PLAIN = "CrossAttnDownBlock2D", "DownBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"
ADAPTER = ".lora_"
"""Part of the names of a LoRA's tensors, in peft."""


class NoiseSchedule(BaseModel):
    """The noise of a pipeline's training; the defaults are Stable Diffusion's."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    timesteps: int = Field(default=1000, ge=2, le=100_000, description="number of times")
    beta_start: float = Field(default=0.00085, gt=0, lt=1, description="β at time 0")
    beta_end: float = Field(default=0.012, gt=0, lt=1, description="β at the last time")
    beta_schedule: Literal["linear", "scaled_linear"] = Field(
        default="scaled_linear", description="whether β or its root grows linearly"
    )

    def sigmas(self) -> Tensor:
        """σ of each timestep, in float64.

        >>> [round(float(sigma), 4) for sigma in NoiseSchedule().sigmas()[[0, 354, 999]]]
        [0.0292, 1.0004, 14.6146]
        """
        power = 2 if self.beta_schedule == "scaled_linear" else 1
        ends = self.beta_start ** (1 / power), self.beta_end ** (1 / power)
        betas = torch.linspace(*ends, self.timesteps, dtype=torch.float64, device="cpu") ** power
        kept = (1 - betas).cumprod(0)
        return ((1 - kept) / kept).sqrt()


class Lora(BaseModel):
    """Low-rank changes of some linear layers: what is trained instead of the UNet itself."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: PositiveInt = Field(default=64, description="rank of the changes")
    alpha: PositiveInt = Field(default=64, description="the changes are multiplied by alpha/rank")
    targets: tuple[str, ...] = Field(
        default=("to_q", "to_k", "to_v", "to_out.0"),
        min_length=1,
        max_length=100,
        description="endings of the layers' names",
    )


class DiffusersUNetConfig(NetworkConfig):
    """diffusers' UNet2DConditionModel; its own keys have diffusers' names."""

    kind: Literal["diffusers_unet"] = "diffusers_unet"
    prediction: Literal["epsilon", "v_prediction"] = Field(
        default="epsilon", description="what the UNet was trained to predict: the noise, or v"
    )
    noise: NoiseSchedule = Field(default=NoiseSchedule(), description="noise levels that the UNet was trained with")
    gradient_checkpointing: bool = Field(
        default=False,
        description="recompute activations in the backward pass: less memory, a third more work",
        json_schema_extra={"on_resume": "free"},
    )
    lora: Lora | None = Field(default=None, description="train these low-rank changes only; unset: all weights")

    sample_size: PositiveInt = Field(default=64, description="side of the latents that it was trained on")
    in_channels: PositiveInt = Field(default=4, description="channels of the latents")
    out_channels: PositiveInt = Field(default=4, description="channels of the prediction")
    flip_sin_to_cos: bool = Field(default=True, description="order of the timestep's embedding")
    freq_shift: int = Field(default=0, description="shift of the embedding's frequencies")
    down_block_types: tuple[str, ...] = Field(
        default=(DOWN, DOWN, DOWN, DOWN_PLAIN),
        max_length=32,
        description="diffusers' classes of the blocks on the way down",
    )
    up_block_types: tuple[str, ...] = Field(
        default=(UP_PLAIN, UP, UP, UP), max_length=32, description="diffusers' classes of the blocks on the way up"
    )
    only_cross_attention: bool = Field(default=False, description="whether the blocks have no self-attention")
    block_out_channels: tuple[PositiveInt, ...] = Field(
        default=(320, 640, 1280, 1280), max_length=32, description="channels of each level"
    )
    layers_per_block: Blocks = Field(default=2, description="residual blocks per level")
    downsample_padding: int = Field(default=1, description="padding of the convolutions that halve the resolution")
    mid_block_scale_factor: float = Field(default=1.0, description="divides the residual blocks' output in the middle")
    act_fn: Literal["silu", "swish", "mish", "gelu", "relu"] = Field(default="silu", description="activation")
    norm_num_groups: PositiveInt = Field(default=32, description="groups of the group norms")
    norm_eps: float = Field(default=1e-5, description="ε of the group norms")
    cross_attention_dim: PositiveInt = Field(default=768, description="width of the text embeddings")
    transformer_layers_per_block: Blocks = Field(default=1, description="transformer layers in an attention")
    attention_head_dim: PositiveInt | tuple[PositiveInt, ...] = Field(
        default=8, description="number of attention heads, for all levels or for each; diffusers calls it a dimension"
    )
    use_linear_projection: bool = Field(
        default=False, description="linear layers around a transformer, not 1×1 convolutions"
    )
    upcast_attention: bool = Field(default=False, description="attention weights in fp32")

    comes_with_pipeline: ClassVar[bool] = True
    computes_in_half: ClassVar[bool] = True
    free_keys: ClassVar[frozenset[str]] = NetworkConfig.free_keys | {"gradient_checkpointing", "lora"}

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of UNet2DConditionModel."""
        return {name: getattr(self, name) for name in UNET_KEYS}

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "DiffusersUNet":
        self.check(image_shape)
        if not self.takes(condition):
            raise TcmError(f"network.kind={self.kind!r} needs texts, but the condition is {condition or 'none'}")
        return DiffusersUNet(self)

    @classmethod
    def takes(cls, condition: ConditionKind | None) -> bool:
        return isinstance(condition, Texts)

    def check(self, image_shape: ImageShape) -> None:
        channels, *sides = image_shape
        if channels != self.in_channels:
            raise TcmError(
                f"image_shape={list(image_shape)} has {channels} channels, but network.in_channels={self.in_channels}; "
                "give the shape of the latents, such as [4, 64, 64] for images of 512 × 512"
            )
        step = 2 ** (len(self.block_out_channels) - 1)
        for side in sides:
            if side % step:
                raise TcmError(
                    f"image_shape={list(image_shape)}: {side} is not a multiple of {step}, which the "
                    f"{len(self.block_out_channels)} levels need; use other latents"
                )

    def check_scales(self, sigma_data: float, t_max: float) -> None:
        """The UNet knows latents of unit variance, up to the noise of its last timestep."""
        highest = float(self.noise.sigmas()[-1])
        if sigma_data != 1:
            raise TcmError(f"sigma_data={sigma_data:g}, but network.kind={self.kind!r} needs sigma_data=1.0")
        if t_max > highest * (1 + 1e-6):
            raise TcmError(
                f"t_max={t_max:g} lies above the noise that the UNet knows; use t_max={math.floor(highest * 1e4) / 1e4}"
            )

    def keeping_all(self) -> Self:
        return self.model_copy(update={"gradient_checkpointing": False})

    def sampled_by(self, sampler: Sampler) -> Sampler:
        """At σ = 14.6 the data still counts: sampling starts with its variance too, as diffusers does."""
        return sampler.from_marginal()


UNET_KEYS = tuple(
    DiffusersUNetConfig.model_fields.keys()
    - NetworkConfig.model_fields.keys()
    - {"prediction", "noise", "gradient_checkpointing", "lora"}
)
"""The keys that are arguments of UNet2DConditionModel."""


class DiffusersUNet(Network):
    """F for ε-prediction is σ x − √(1 + σ²) ε(x, timestep(σ)), so that f(x, σ) = x − σ ε; for v-prediction it is −v.

    x is the scaled input c_in(σ) x, which is the pipeline's own. UNets take fractional timesteps: between two of them
    the timestep is linear in ln σ.
    """

    def __init__(self, config: DiffusersUNetConfig) -> None:
        super().__init__()
        self.config = config
        self.unet = _unet(config)
        self.log_sigmas = config.noise.sigmas().log().float()

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        if not isinstance(condition, TextEmbeddings):
            raise TcmError("this network needs texts; give their embeddings as the condition")
        # c_noise = ln(σ)/4
        log_sigma = 4 * c_noise
        with self._computing(x.device):
            prediction = self.unet(x, self.timestep(log_sigma), condition.tokens.to(x.dtype)).sample.to(x.dtype)
        if self.config.prediction == "v_prediction":
            return -prediction
        sigma = log_sigma.exp()[:, None, None, None]
        return sigma * x - (1 + sigma**2).sqrt() * prediction

    def _computing(self, device: torch.device) -> AbstractContextManager[object]:
        """Whole in 16 bits: diffusers' layers expect inputs of their weights' precision, so autocast converts both."""
        return nullcontext() if self.arithmetic is None else torch.autocast(device.type, self.arithmetic)

    def timestep(self, log_sigma: Tensor) -> Tensor:
        """The UNet's own time, between 0 and 999."""
        known = self.log_sigmas.to(log_sigma.device)
        after = torch.searchsorted(known, log_sigma.detach().contiguous()).clamp(1, len(known) - 1)
        low, high = known[after - 1], known[after]
        return after - 1 + ((log_sigma - low) / (high - low)).clamp(0, 1)

    def learning(self) -> list[nn.Parameter]:
        if self.config.lora is None:
            return super().learning()
        return [parameter for name, parameter in self.named_parameters() if ADAPTER in name]

    def starting_from(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A UNet without LoRA gives its weights to one that has one, which keeps its own low-rank changes."""
        if self.config.lora is None or any(ADAPTER in name for name in weights):
            return dict(weights)
        own = self.state_dict()
        renamed = {name.replace(".base_layer.", "."): name for name in own}
        changes = {name: tensor for name, tensor in own.items() if ADAPTER in name}
        return {renamed.get(name, name): tensor for name, tensor in weights.items()} | changes

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """The UNet's weights under diffusers' names, with a LoRA's changes added to them."""
        if self.config.lora is None:
            return dict(self.unet.state_dict())
        from peft.tuners.lora import LoraLayer

        weights = {name: tensor for name, tensor in self.unet.state_dict().items() if ADAPTER not in name}
        for name, layer in self.unet.named_modules():
            if isinstance(layer, LoraLayer):
                weights[f"{name}.base_layer.weight"] = layer.base_layer.weight + layer.get_delta_weight("default")
        return {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items()}

    def blocks(self) -> list[nn.Module]:
        """Each residual block and each transformer."""
        parts = [*self.unet.down_blocks, self.unet.mid_block, *self.unet.up_blocks]
        children = [
            child for part in parts for name, child in part.named_children() if name in ("resnets", "attentions")
        ]
        return [block for child in children for block in child]


def _unet(config: DiffusersUNetConfig) -> Any:
    try:
        from diffusers import UNet2DConditionModel
        from peft import LoraConfig
    except ImportError as error:
        raise TcmError(f"network.kind={config.kind!r} needs more packages; {how_to_install('t2i')}") from error
    unet = UNet2DConditionModel(**config.arguments)
    if config.lora is not None:
        lora = config.lora
        unet.add_adapter(LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=list(lora.targets)))
    if config.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    for module in unet.modules():
        if isinstance(module, nn.GroupNorm | nn.LayerNorm):
            module.register_forward_pre_hook(_in_its_own_precision)
    return unet


def _in_its_own_precision(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
    """Under autocast normalisations compute in float32 on a GPU; on a CPU they mix precisions, and tangents fail."""
    weight = module.weight
    return (inputs[0].to(weight.dtype),) if isinstance(weight, Tensor) else inputs

"""Our networks as diffusers calls them; this module needs diffusers, so it is imported only where that is wanted."""

from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from pydantic import TypeAdapter
from torch import Tensor

from tcm.method.conditions import Classes, Labels
from tcm.method.preconditioning import Network
from tcm.networks import AnyNetwork


class ConsistencyUNet(ModelMixin, ConfigMixin):  # type: ignore[misc]
    """F of a consistency model, as `ConsistencyModelPipeline` calls it; the scheduler makes f of it.

    `network_config` holds the values of the network's config. Times below `t_min`, where the model is undefined, are
    refused.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        network_config: dict[str, Any],
        sample_size: int,
        in_channels: int,
        out_channels: int,
        num_class_embeds: int | None,
        t_min: float,
    ) -> None:
        super().__init__()
        self.network = build_network(network_config, (in_channels, sample_size, sample_size), num_class_embeds or 0)

    def forward(
        self, sample: Tensor, timestep: Tensor, class_labels: Tensor | None = None, return_dict: bool = False
    ) -> tuple[Tensor]:
        """F(sample, c_noise), where c_noise = ln(t)/4 is a thousandth of the scheduler's `timestep`."""
        c_noise = torch.as_tensor(timestep, device=sample.device) / 1000
        if float((4 * c_noise.double()).exp().min()) < self.config.t_min * (1 - 1e-6):
            raise ValueError(
                f"num_inference_steps must be 1 or 2: another step would be below t={self.config.t_min:g}, where this "
                "model is undefined"
            )
        classes = self.config.num_class_embeds or 0
        if class_labels is not None and not bool(((class_labels >= 0) & (class_labels < classes)).all()):
            raise ValueError(f"class_labels={class_labels.tolist()} must lie between 0 and {classes - 1}")
        c_noise = c_noise.to(torch.float32).expand(sample.shape[0])
        condition = None if class_labels is None else Labels(class_labels.long())
        return (self.network(sample, c_noise, condition, None).to(sample.dtype),)


def build_network(values: dict[str, Any], image_shape: tuple[int, int, int], classes: int) -> Network:
    """The network of a config's values."""
    config = TypeAdapter(AnyNetwork).validate_python(values)
    return config.build(image_shape, Classes(classes) if classes else None)

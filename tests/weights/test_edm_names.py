"""The reference's names and arguments, there and back."""

import pytest
import torch
from torch import Tensor

from tcm import Classes, DDPMppConfig, Denoiser, EDM2Config
from tcm.foundation.errors import TcmError
from tcm.weights.edm_names import load_denoiser, parse_arguments, reference_names

GOLDEN_NETWORKS = ["ddpmpp_uncond_16", "edm2_cond_16"]


@pytest.fixture(params=GOLDEN_NETWORKS)
def checkpoint(request, golden) -> tuple[dict[str, Tensor], dict[str, object]]:
    tensors, arguments = golden(request.param)
    return {k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")}, arguments


def test_every_tensor_has_one_name_in_the_reference(checkpoint) -> None:
    weights, arguments = checkpoint
    denoiser = load_denoiser(weights, arguments)
    names = reference_names(denoiser)
    assert names.keys() == denoiser.state_dict().keys()
    used = {name.removeprefix("model.") for name in weights} - {
        name.removeprefix("model.") for name in DDPMppConfig.published_left_out(weights)
    }
    assert sorted(names.values()) == sorted(used)


@pytest.mark.parametrize("prefix", ["unet.", "module.model.", "_orig_mod.module.unet.", ""])
def test_prefixes_of_other_files(checkpoint, prefix: str) -> None:
    weights, arguments = checkpoint
    renamed = {prefix + name.removeprefix("model."): tensor for name, tensor in weights.items()}
    first, second = load_denoiser(weights, arguments), load_denoiser(renamed, arguments)
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_float16_files_become_float32(checkpoint) -> None:
    weights, arguments = checkpoint
    denoiser = load_denoiser({name: tensor.half() for name, tensor in weights.items()}, arguments)
    assert {tensor.dtype for tensor in denoiser.state_dict().values()} == {torch.float32}


def test_missing_unknown_and_misshapen_tensors_are_named_as_in_the_file(checkpoint) -> None:
    weights, arguments = checkpoint
    name = next(name for name in weights if name.endswith("16x16_conv.weight"))
    own = name.removeprefix("model.")
    with pytest.raises(TcmError, match=f"lacks {own}"):
        load_denoiser({k: v for k, v in weights.items() if k != name}, arguments)
    with pytest.raises(TcmError, match=r"has enc.surplus"):
        load_denoiser(weights | {"model.enc.surplus": torch.zeros(1)}, arguments)
    with pytest.raises(TcmError, match=rf"{own} has shape \[1\]"):
        load_denoiser(weights | {name: torch.zeros(1)}, arguments)


def test_a_learned_uncertainty_is_taken_over(golden) -> None:
    tensors, arguments = golden("edm2_cond_16")
    weights = {k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")}
    head = {
        "logvar_fourier.freqs": torch.randn(16),
        "logvar_fourier.phases": torch.randn(16),
        "logvar_linear.weight": torch.randn(1, 16),
    }
    if not head.keys() <= weights.keys():
        assert load_denoiser(weights, arguments).uncertainty is None
    uncertainty = load_denoiser(weights | head, arguments).uncertainty
    assert torch.equal(uncertainty.weight, head["logvar_linear.weight"])
    assert torch.equal(uncertainty.freqs, head["logvar_fourier.freqs"])


def test_what_is_left_out_is_reported() -> None:
    quarter = torch.full((1, 1, 2, 2), 0.25)
    found = DDPMppConfig.published_left_out(
        {"model.map_augment.weight": torch.zeros(3, 9), "enc.16x16_down.conv0.resample_filter": quarter}
    )
    assert list(found) == ["model.map_augment.weight", "enc.16x16_down.conv0.resample_filter"]
    with pytest.raises(TcmError, match="resample_filter is not the filter"):
        DDPMppConfig.published_left_out({"a.resample_filter": torch.full((1, 1, 4, 4), 1 / 16)})


def test_defaults_are_the_papers_networks() -> None:
    config, shape, condition = parse_arguments({"img_resolution": 32, "img_channels": 3, "dropout": 0.2})
    assert (config, shape, condition) == (DDPMppConfig(dropout=0.2), (3, 32, 32), None)
    config, shape, condition = parse_arguments({"img_resolution": 64, "label_dim": 1000, "model_type": "EDM2UNet"})
    assert (config, shape, condition) == (EDM2Config(), (3, 64, 64), Classes(1000))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"encoder_type": "residual"}, "encoder_type='residual'"),
        ({"embedding_type": "fourier"}, "NCSN"),
        ({"resample_filter": [1, 3, 3, 1]}, "resample_filter"),
        (
            {"model_type": "DhariwalUNet"},
            "the network 'DhariwalUNet' is not supported; supported are: SongUNet, UNet, EDM2UNet",
        ),
    ],
)
def test_other_architectures_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(TcmError, match=message):
        parse_arguments({"img_resolution": 32} | arguments)


def test_networks_without_names_in_the_reference_are_refused() -> None:
    from oracles import NoNetwork

    with pytest.raises(TcmError, match="NoNetwork has no counterpart"):
        reference_names(Denoiser(NoNetwork(), (1, 4, 4)))

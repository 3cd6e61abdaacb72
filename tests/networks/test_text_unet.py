"""The U-Net that reads texts: what it takes, what it ignores, and what can be done with it."""

from dataclasses import replace

import pytest
import torch
from pydantic import ValidationError

from tcm.foundation.errors import TcmError
from tcm.foundation.randomness import SampleStreams
from tcm.method.conditions import Classes, Labels, TextEmbeddings
from tcm.method.preconditioning import Denoiser, column
from tcm.method.tangents import tangent
from tcm.networks import DDPMppConfig, TextUNetConfig
from tcm.networks.cost import network_cost
from tcm.networks.text_unet import TextUNet
from tcm.text.condition import UNREAD, Texts

KIND = Texts("somewhere", 16, 6)
SHAPE = (3, 16, 16)
SMALL = TextUNetConfig(
    channels=8, channel_mult=(1, 2), attention=(4,), cross_attention=(8, 4), heads=2, patch=2, dropout=0.2
)


def random_text(count: int) -> TextEmbeddings:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(6) < torch.arange(2, 2 + count)[:, None].clamp_max(6)
    return TextEmbeddings(torch.randn(count, 6, 16, generator=generator), mask, torch.zeros(6, 16), mask[0])


@pytest.fixture(scope="module")
def network() -> TextUNet:
    """With weights that are not zero anywhere, so that every part has an effect."""
    torch.manual_seed(0)
    built = SMALL.build(SHAPE, KIND)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return built


def call(network: TextUNet, text: TextEmbeddings | None, count: int = 3) -> torch.Tensor:
    x = SampleStreams(range(count)).normal(SHAPE)
    return network(x, torch.linspace(-1, 1, count), text, None)


def test_every_text_counts_for_its_own_image(network: TextUNet) -> None:
    text = random_text(3)
    before = call(network, text)
    changed = text.tokens.clone()
    changed[1, 0, :8] += 1
    after = call(network, replace(text, tokens=changed))
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], atol=1e-5, rtol=1e-5)
    assert (after[1] - before[1]).abs().max() > 1e-3
    assert (call(network, None) - before).abs().max() > 1e-3


def test_tokens_that_do_not_count_have_no_effect(network: TextUNet) -> None:
    text = random_text(3)
    padded = torch.where(text.mask[..., None], text.tokens, 7.0)
    torch.testing.assert_close(call(network, replace(text, tokens=padded)), call(network, text), atol=1e-5, rtol=1e-5)


def test_half_precision_texts_are_taken(network: TextUNet) -> None:
    text = random_text(3)
    found = call(network, replace(text, tokens=text.tokens.half()))
    torch.testing.assert_close(found, call(network, text), atol=0.02, rtol=0.02)


def test_dropout_masks_are_replayed_for_a_subset(network: TextUNet) -> None:
    text, x = random_text(3), SampleStreams(range(3)).normal(SHAPE)
    masks = network.draw_masks(SampleStreams(range(3)))
    assert masks is not None
    assert len(masks) == len(network.encoder) + len(network.decoder)
    whole = network(x, torch.zeros(3), text, masks)
    rows = torch.tensor([2])
    part = network(x[rows], torch.zeros(1), text.select(rows), [mask[rows] for mask in masks])
    torch.testing.assert_close(part, whole[rows], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(whole, network(x, torch.zeros(3), text, None))


def test_a_tangent_agrees_with_a_difference(network: TextUNet) -> None:
    """Forward mode goes through the attention to the text; the one to the image needs torch's math kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    f = Denoiser(network, SHAPE, KIND).double()
    text = replace(random_text(1), tokens=random_text(1).tokens.double(), null_tokens=torch.zeros(6, 16).double())
    x, direction = (SampleStreams([seed]).normal(SHAPE).double() for seed in (0, 1))

    def F(x: torch.Tensor) -> torch.Tensor:
        return f.network(x, torch.zeros(1, dtype=torch.float64), text, None)

    with sdpa_kernel(SDPBackend.MATH):
        _, along = torch.func.jvp(F, (x,), (direction,))
    difference = (F(x + 1e-5 * direction) - F(x - 1e-5 * direction)) / 2e-5
    torch.testing.assert_close(along, difference, atol=1e-4, rtol=1e-3)
    f.float()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_tangent_and_gradient_in_half_precision(
    network: TextUNet, half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly those of float32."""
    f, text = Denoiser(network, SHAPE, KIND), random_text(3)
    t = torch.tensor([0.05, 1.0, 40.0], dtype=torch.float64)
    x, eps = (SampleStreams(range(seed, seed + 3)).normal(SHAPE) for seed in (0, 10))
    x_t = x + column(t, x) * eps

    def gradient() -> torch.Tensor:
        parts = torch.autograd.grad(f(x_t, t, text).square().mean(), list(network.parameters()))
        return torch.cat([part.flatten() for part in parts])

    exact, by_weights = tangent(f, x_t, t, eps, text).flatten(1), gradient()
    monkeypatch.setattr(network, "arithmetic", half)
    found, in_half = tangent(f, x_t, t, eps, text).flatten(1), gradient()
    assert float(torch.cosine_similarity(found, exact).min()) > 0.998
    assert float(torch.cosine_similarity(in_half, by_weights, dim=0)) > 0.99
    for values, others in ((found, exact), (in_half, by_weights)):
        assert not torch.allclose(values, others, rtol=1e-5), "it was computed in half precision"


def test_it_exports_with_any_batch(network: TextUNet) -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: torch.Tensor, t: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.network(x, t, TextEmbeddings(tokens, mask, tokens[0], mask[0]), None)

    batch = torch.export.Dim("batch", min=2, max=64)
    text, x = random_text(3), SampleStreams(range(3)).normal(SHAPE)
    given = (x, torch.zeros(3), text.tokens, text.mask)
    exported = torch.export.export(Plain(), given, dynamic_shapes=({0: batch},) * 4).module()
    more = random_text(5)
    five = (SampleStreams(range(5)).normal(SHAPE), torch.zeros(5), more.tokens, more.mask)
    torch.testing.assert_close(exported(*five), Plain()(*five), atol=1e-5, rtol=1e-5)


def test_its_cost_and_its_blocks() -> None:
    cost = network_cost(TextUNetConfig(), (3, 32, 32), Texts("somewhere", 384, 24))
    assert round(cost.parameters / 1e6, 2) == 3.67
    assert cost.forward_flops > 2e8
    blocks = SMALL.build(SHAPE, KIND).blocks()
    assert {type(block).__name__ for block in blocks} == {"TextBlock"}


def test_what_it_refuses(network: TextUNet) -> None:
    assert TextUNetConfig.takes(KIND)
    assert not any(TextUNetConfig.takes(kind) for kind in (None, Classes(10), UNREAD))
    with pytest.raises(
        TcmError, match=r"condition=10 classes does not fit network.kind='text_unet', which takes texts"
    ):
        SMALL.build(SHAPE, Classes(10))
    with pytest.raises(
        TcmError, match=r"condition=texts by somewhere, .* does not fit this network, which takes class"
    ):
        DDPMppConfig(channels=8).build(SHAPE, KIND)
    with pytest.raises(TcmError, match=r"image height=15 is not a multiple of network.patch=2; resize the images"):
        SMALL.check((3, 15, 16))
    with pytest.raises(TcmError, match="channels=20 gives a layer of 180 channels, which group normalisation cannot"):
        TextUNetConfig(channels=20, channel_mult=(1, 9), heads=1).check(SHAPE)
    with pytest.raises(TcmError, match=r"network.heads=3 does not divide a layer of 8 channels"):
        SMALL.model_copy(update={"heads": 3}).check(SHAPE)
    with pytest.raises(TcmError, match="a Labels condition does not fit this network; give it texts"):
        network(torch.zeros(1, *SHAPE), torch.zeros(1), Labels(torch.zeros(1, dtype=torch.long)), None)
    with pytest.raises(ValidationError):
        TextUNetConfig(patch=0)

"""The networks: counts, shapes, precision, dropout, normalisation, what they refuse."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

from tcm import Classes, DDPMppConfig, EDM2Config, Labels, Network, SampleStreams
from tcm.foundation.errors import TcmError
from tcm.networks.ddpmpp import positional_embedding
from tcm.networks.edm2 import MPConv, MPLinear, mp_cat, mp_silu, mp_sum, normalize
from tcm.networks.forward_mode import attend
from tcm.networks.layers import drop, merge_heads, one_hot, resample, split_heads

SMALL = {
    "ddpmpp": DDPMppConfig(channels=16, channel_mult=(1, 2), blocks=1, attention=(4,), dropout=0.2),
    "edm2": EDM2Config(channels=64, channel_mult=(1, 2), blocks=1, attention=(4,), dropout=0.2),
}
small = pytest.mark.parametrize("config", SMALL.values(), ids=SMALL.keys())


def stir(network: Network) -> Network:
    """Leave the initialisation, in which some layers give zero."""
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize(
    ("name", "config", "shape", "classes"),
    [
        ("ddpmpp_cifar10", DDPMppConfig(), (3, 32, 32), 0),
        ("edm2_img64_s", EDM2Config(), (3, 64, 64), 1000),
        ("edm2_img64_m", EDM2Config(channels=256), (3, 64, 64), 1000),
        ("edm2_img64_l", EDM2Config(channels=320), (3, 64, 64), 1000),
        ("edm2_img64_xl", EDM2Config(channels=384), (3, 64, 64), 1000),
    ],
)
def test_parameter_counts_are_the_papers(numbers, name: str, config, shape, classes: int) -> None:
    with torch.device("meta"):
        network = config.build(shape, Classes(classes) if classes else None)
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == round(numbers["parameters_millions"][name] * 1e6)


@settings(max_examples=25)
@given(
    kind=st.sampled_from(["ddpmpp", "edm2"]),
    channels=st.sampled_from([8, 16, 32]),
    mult=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    size=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    blocks=st.integers(1, 2),
    classes=st.sampled_from([0, 1, 5]),
    attends=st.booleans(),
)
def test_any_shape_that_the_levels_divide(kind, channels, mult, size, blocks, classes, attends) -> None:
    """Non-square images, one channel or more, one level or three, odd level sizes, with classes or without."""
    step = 2 ** (len(mult) - 1)
    shape = (size[0], size[1] * step, size[2] * step)
    make = DDPMppConfig if kind == "ddpmpp" else EDM2Config
    config = make(
        channels=channels,
        channel_mult=tuple(mult),
        blocks=blocks,
        attention=(max(shape[1:]),) if attends else (),
        dropout=0.5,
    )
    network = stir(config.build(shape, Classes(classes) if classes else None))
    streams = SampleStreams([0, 1])
    labels = Labels(torch.tensor([0, -1])) if classes else None
    out = network(torch.randn(2, *shape), torch.tensor([-1.0, 1.0]), labels, network.draw_masks(streams))
    assert out.shape == (2, *shape)
    assert bool(out.isfinite().all())
    out.square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in network.parameters())


@pytest.mark.parametrize("make", [DDPMppConfig, EDM2Config])
@pytest.mark.parametrize(
    ("shape", "named"),
    [((1, 6, 8), "height=6"), ((1, 8, 10), "width=10"), ((1, 0, 8), "height=0"), ((1, 8, -4), "width=-4")],
)
def test_images_that_the_levels_do_not_divide_are_refused(make, shape, named: str) -> None:
    with pytest.raises(TcmError, match=f"{named} is not a multiple of 4"):
        make(channels=16, channel_mult=(1, 1, 1)).build(shape, None)


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (DDPMppConfig, "channels", 0),
        (DDPMppConfig, "channels", 7),
        (EDM2Config, "channels", -1),
        (EDM2Config, "channel_mult", ()),
        (EDM2Config, "blocks", 0),
        (DDPMppConfig, "dropout", 1.0),
        (DDPMppConfig, "dropout", -0.1),
        (EDM2Config, "dropout_up_to", 0),
        (EDM2Config, "typo", 1),
    ],
)
def test_impossible_configs_are_refused(make, field: str, value) -> None:
    with pytest.raises(ValidationError, match=field):
        make(**{field: value})


def test_attention_heads() -> None:
    """One per 64 channels; none below, as in the reference; a width that they cannot share is an error."""
    for width, heads in ((64, 1), (96, 1), (128, 2), (192, 3)):
        config = EDM2Config(channels=width, channel_mult=(1,), blocks=1, attention=(4,))
        network = config.build((1, 4, 4), None)
        assert {block.attention.heads for block in network.encoder} == {heads}
    with torch.device("meta"):
        narrow = EDM2Config(channels=32, channel_mult=(1,), blocks=1, attention=(4,)).build((1, 4, 4), None)
    assert all(block.attention is None for block in narrow.decoder)
    with pytest.raises(TcmError, match="attention layer of 200 channels, which its 3 heads do not divide"):
        EDM2Config(channels=200, channel_mult=(1,), attention=(4,)).build((1, 4, 4), None)


def test_widths_that_group_normalisation_cannot_divide_are_refused() -> None:
    with pytest.raises(TcmError, match="channels=48 gives a layer of 144 channels"):
        DDPMppConfig(channels=48, channel_mult=(1, 2), blocks=1).build((1, 8, 8), None)


@small
def test_labels_matter_and_no_label_is_none(config) -> None:
    network = stir(config.build((1, 8, 8), Classes(3))).eval()
    x, c_noise = torch.randn(1, 1, 8, 8).expand(4, -1, -1, -1), torch.zeros(4)
    with torch.no_grad():
        out = network(x, c_noise, Labels(torch.tensor([0, 1, 2, -1])), None)
        without = network(x, c_noise, None, None)
    assert len({tuple(row.flatten().tolist()) for row in out}) == 4
    torch.testing.assert_close(out[3], without[0])


@small
def test_dropout_is_an_argument_and_not_a_mode(config) -> None:
    network = stir(config.build((1, 8, 8), None))
    x, c_noise = torch.randn(2, 1, 8, 8), torch.zeros(2)
    with torch.no_grad():
        plain = network.train()(x, c_noise, None, None)
        assert torch.equal(plain, network.eval()(x, c_noise, None, None))
        masks = network.draw_masks(SampleStreams([0, 1]))
        dropped = network(x, c_noise, None, masks)
        assert torch.equal(dropped, network(x, c_noise, None, masks))
        assert not torch.allclose(dropped, plain)
        other = network(x, c_noise, None, network.draw_masks(SampleStreams([0, 2])))
    torch.testing.assert_close(other[0], dropped[0], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(other[1], dropped[1])


@small
def test_every_mask_is_used(config) -> None:
    network = stir(config.build((1, 8, 8), None))
    x, c_noise = torch.randn(1, 1, 8, 8), torch.zeros(1)
    ones = [torch.ones(1, *shape, dtype=torch.bool) for shape in network.dropout_shapes]
    with torch.no_grad():
        all_kept = network(x, c_noise, None, ones)
        for place in range(len(ones)):
            masks = [~mask if place == other else mask for other, mask in enumerate(ones)]
            assert not torch.allclose(network(x, c_noise, None, masks), all_kept), place


@small
def test_no_sample_is_a_batch_too(config) -> None:
    """A process whose share has no target of one kind still calls that network."""
    network = config.build((1, 8, 8), Classes(2))
    masks = network.draw_masks(SampleStreams([]))
    out = network(torch.empty(0, 1, 8, 8), torch.empty(0), Labels(torch.empty(0, dtype=torch.int64)), masks)
    assert out.shape == (0, 1, 8, 8)


def test_edm2_drops_at_low_resolutions_only() -> None:
    config = EDM2Config(channels=16, channel_mult=(1, 1, 1), blocks=1, dropout=0.4, dropout_up_to=8)
    shapes = config.build((1, 16, 12), None).dropout_shapes
    assert {shape[1:] for shape in shapes} == {(8, 6), (4, 3)}


def test_dropout_keeps_the_mean() -> None:
    x = torch.ones(1, 100, 10, 10)
    masks = [SampleStreams([0]).bernoulli((100, 10, 10), 0.8)]
    assert float(drop(x, masks, 0, 0.2).mean()) == pytest.approx(1, abs=0.02)
    assert drop(x, masks, None, 0.2) is x
    assert drop(x, None, 0, 0.2) is x
    assert SMALL["ddpmpp"].dropout > 0
    assert (
        SMALL["ddpmpp"].model_copy(update={"dropout": 0.0}).build((1, 8, 8), None).draw_masks(SampleStreams([0]))
        is None
    )


def snapshot(network: Network) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


@small
def test_forward_and_backward_passes_change_no_weight(config) -> None:
    network = stir(config.build((1, 8, 8), None)).train()
    before = snapshot(network)
    for _ in range(2):
        network(torch.randn(2, 1, 8, 8), torch.zeros(2), None, None).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_forced_normalisation_is_explicit_and_leaves_the_function_alone() -> None:
    network = stir(SMALL["edm2"].build((1, 8, 8), Classes(2)))
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, MPConv | MPLinear):
                module.weight.mul_(3.0)
    x, c_noise, labels = torch.randn(2, 1, 8, 8), torch.zeros(2), Labels(torch.tensor([0, 1]))
    with torch.no_grad():
        before = network(x, c_noise, labels, None)
        gains = {name: p.clone() for name, p in network.named_parameters() if "gain" in name}
        network.normalize_weights()
        torch.testing.assert_close(network(x, c_noise, labels, None), before, rtol=1e-2, atol=2e-3)
    for name, parameter in network.named_parameters():
        if name in gains:
            assert torch.equal(parameter, gains[name])
        else:
            rows = parameter.detach().flatten(1)
            torch.testing.assert_close(rows.square().mean(1).sqrt(), torch.ones(len(rows)), rtol=1e-3, atol=0)
    assert all(parameter.requires_grad for parameter in network.parameters())


def test_ddpmpp_has_no_forced_normalisation() -> None:
    network = stir(SMALL["ddpmpp"].build((1, 8, 8), None))
    before = snapshot(network)
    network.normalize_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_edm2_keeps_magnitudes_at_initialisation() -> None:
    """Activations of unit magnitude in, unit magnitude before the output's gain, whatever the depth."""
    config = EDM2Config(channels=64, channel_mult=(1, 2), blocks=2, attention=(8,))
    network = config.build((3, 16, 16), None)
    seen: list[float] = []
    for block in [*network.encoder, *network.decoder]:
        block.register_forward_hook(lambda module, inputs, out: seen.append(float(out.square().mean().sqrt())))
    with torch.no_grad():
        network(torch.randn(4, 3, 16, 16), torch.zeros(4), None, None)
    assert len(seen) > 10
    assert all(0.6 < magnitude < 1.6 for magnitude in seen)


def test_edm2_clips_what_float16_could_not_hold() -> None:
    block = SMALL["edm2"].build((1, 8, 8), None).decoder[0]
    with torch.no_grad():
        out = block(torch.full((1, 128, 4, 4), 1e5), torch.zeros(1, 128), None)
    assert float(out.abs().max()) == 256


@small
@pytest.mark.parametrize("masked", [False, True])
def test_autocast(config, masked: bool) -> None:
    network = stir(config.build((1, 8, 8), Classes(2)))
    masks = network.draw_masks(SampleStreams([0, 1])) if masked else None
    x, c_noise, labels = torch.randn(2, 1, 8, 8), torch.tensor([-1.5, 1.0]), Labels(torch.tensor([0, 1]))
    full = network(x, c_noise, labels, masks)
    with torch.autocast("cpu", torch.bfloat16):
        out = network(x, c_noise, labels, masks)
    assert out.dtype == torch.bfloat16
    assert float((out.float() - full).detach().norm() / full.detach().norm()) < 0.05
    out.float().square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in network.parameters())


@small
def test_t_and_labels_are_embedded_in_float32_under_autocast(config) -> None:
    """As the reference does: bit for bit what a float32 pass embeds, down to each block's own map of it."""
    network = stir(config.build((1, 8, 8), Classes(2)))
    found: list[list[Tensor]] = []
    for module in network.modules():
        if isinstance(module, MPLinear | nn.Linear):
            module.register_forward_hook(lambda _, inputs, out: found[-1].append(out.detach()))
    for enabled in (False, True):
        found.append([])
        with torch.autocast("cpu", torch.float16, enabled=enabled):
            network(torch.randn(2, 1, 8, 8), torch.tensor([-1.5, 1.0]), Labels(torch.tensor([0, 1])), None)
    assert len(found[0]) > 5
    assert all(out.dtype == torch.float32 for out in found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_positional_embedding() -> None:
    out = positional_embedding(torch.tensor([0.5]), 8)[0]
    frequencies = 10_000.0 ** -(np.arange(4) / 3)
    np.testing.assert_allclose(out, [*np.sin(0.5 * frequencies), *np.cos(0.5 * frequencies)], rtol=1e-5, atol=1e-8)


def test_magnitude_preserving_pieces() -> None:
    a, b = torch.randn(4, 1000, 4, 4), torch.randn(4, 500, 4, 4)
    assert float(mp_silu(a).square().mean().sqrt()) == pytest.approx(1, abs=0.02)
    assert float(mp_sum(a[:, :500], b, 0.3).square().mean().sqrt()) == pytest.approx(1, abs=0.02)
    joined = mp_cat(a, b, 0.5)
    assert float(joined.square().mean().sqrt()) == pytest.approx(1, abs=0.02)
    assert float(joined[:, :1000].square().sum() / joined[:, 1000:].square().sum()) == pytest.approx(1, abs=0.05)
    torch.testing.assert_close(normalize(5 * a, (1,)).square().mean(1), torch.ones(4, 4, 4), rtol=1e-3, atol=0)


def test_normalisation_in_float16_does_not_overflow() -> None:
    x = torch.full((1, 4096, 1, 1), 200.0, dtype=torch.float16)
    assert float(normalize(x, (1,)).mean()) == pytest.approx(1, rel=1e-2)


def test_attention_is_softmax_of_scaled_products() -> None:
    q, k, v = (torch.randn(2, 3, 7, 5) for _ in range(3))
    weights = torch.einsum("bhqd,bhkd->bhqk", q, k).div(5**0.5).softmax(-1)
    torch.testing.assert_close(attend(q, k, v), torch.einsum("bhqk,bhkd->bhqd", weights, v))


def test_heads_are_split_and_merged_by_channel() -> None:
    image = torch.arange(2 * 24 * 3).view(2, 24, 1, 3)
    parts = split_heads(image, heads=2)
    assert parts.shape == (3, 2, 2, 3, 4)
    for part in range(3):
        for head in range(2):
            for d in range(4):
                channel = (head * 4 + d) * 3 + part
                assert torch.equal(parts[part, :, head, :, d], image[:, channel, 0])
    assert torch.equal(merge_heads(parts[1], image[:, :8]), image[:, 1::3])


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient", [False, True], ids=["without gradient", "with gradient"])
@small
def test_attention_takes_the_fused_kernel(config, gradient: bool, precision: torch.dtype) -> None:
    network = config.build((1, 8, 8), None)
    autocast = torch.autocast("cpu", precision, enabled=precision != torch.float32)
    with profile() as profiler, torch.set_grad_enabled(gradient), autocast:
        out = network(torch.randn(2, 1, 8, 8), torch.zeros(2), None, None)
        if gradient:
            out.sum().backward()
    ran = {event.name for event in profiler.events() if "scaled_dot_product" in event.name}
    assert any("flash_attention" in name for name in ran)
    assert any("flash_attention" in name and "backward" in name for name in ran) == gradient
    assert not any("math" in name for name in ran)


@small
def test_attention_of_no_rows_asks_no_kernel(config) -> None:
    """On some devices a fused kernel cannot start for a batch of no rows."""
    network = config.build((1, 8, 8), None)
    with profile() as profiler:
        out = network(torch.empty(0, 1, 8, 8), torch.empty(0), None, None)
        out.sum().backward()
    assert out.shape == (0, 1, 8, 8)
    assert not [event.name for event in profiler.events() if "scaled_dot_product" in event.name]


@small
def test_forward_mode_derivative_through_attention(config) -> None:
    """⟨w, J v⟩ by forward mode is ⟨Jᵀ w, v⟩ by reverse mode, which takes another kernel."""
    network = stir(config.build((1, 8, 8), None))
    x, v, w = torch.randn(3, 2, 1, 8, 8)

    def f(x: Tensor) -> Tensor:
        return network(x, torch.zeros(2), None, None)

    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        _, Jv = torch.func.jvp(f, (x,), (v,))
    x.requires_grad_()
    (JTw,) = torch.autograd.grad(f(x), x, w)
    size = float(Jv.norm() * w.norm())
    assert float((w * Jv).sum()) == pytest.approx(float((JTw * v).sum()), abs=1e-4 * size)


def test_resampling_halves_by_averaging_and_doubles_by_repeating() -> None:
    x = torch.arange(8.0).view(1, 1, 2, 4)
    assert resample(x, "down").flatten().tolist() == [2.5, 4.5]
    assert resample(x, "up").shape == (1, 1, 4, 8)
    assert torch.equal(resample(resample(x, "up"), "down"), x)
    assert resample(x, "keep") is x


@given(
    batch=st.integers(0, 3),
    channels=st.integers(1, 5),
    height=st.integers(1, 4),
    width=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_resampling_is_that_of_torch_in_values_and_gradients(batch, channels, height, width, seed) -> None:
    x = torch.randn(batch, channels, 2 * height, 2 * width, generator=torch.Generator().manual_seed(seed))
    x = x.double().requires_grad_()
    expected = {"down": F.avg_pool2d(x, 2), "up": F.interpolate(x, scale_factor=2, mode="nearest")} if batch else {}
    for mode, known in expected.items():
        found = resample(x, mode)
        weights = torch.randn_like(found)
        torch.testing.assert_close(found, known)
        torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, known)))
    assert resample(x, "down").shape == (batch, channels, height, width)
    assert resample(x, "up").shape == (batch, channels, 4 * height, 4 * width)


def test_one_hot_has_unit_mean_square_and_zero_for_no_label() -> None:
    rows = one_hot(Labels(torch.tensor([2, -1])), 4, torch.empty(2, 0))
    assert rows.tolist() == [[0, 0, 2, 0], [0, 0, 0, 0]]
    assert one_hot(None, 4, torch.empty(2, 0)).tolist() == [[0] * 4] * 2
    torch.testing.assert_close(rows[0], 2 * F.one_hot(torch.tensor(2), 4).float())

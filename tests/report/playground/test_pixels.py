"""The page's pictures are torch's: noise, classes, samples in one and two steps, mixes, paths, completed pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch
from browsing import CHROMIUM
from playgrounds import go, images_of, of_torch, same_pixels, sampled, settle, shown
from playwright.sync_api import Page

import tcm
from tcm.foundation.randomness import SampleStreams

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def model() -> tcm.Model:
    return tcm.load("digits")


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 1, 2**53 - 1])
def test_noise_and_class_of_a_seed(digits: Page, seed: int) -> None:
    streams = SampleStreams([seed])
    for draw in (0, 1):
        found = digits.evaluate(f"Array.from(playground.normal({seed}, {draw}, 193))")
        assert torch.equal(torch.tensor(found, dtype=torch.float32), streams.normal((193,))[0])
    for classes in (2, 10, 1000):
        expected = tcm.Classes(classes).draw([seed]).index.item()
        assert digits.evaluate(f"playground.classOf({seed}, {classes})") == expected


def test_the_grid_is_what_the_command_draws(digits: Page, model: tcm.Model) -> None:
    go(digits, "#seed=640&class=3&steps=2&t2=1.7&image=5")
    same_pixels(shown(digits, "#grid canvas"), images_of(model, range(640, 704), labels=3, times=(80.0, 1.7)))
    assert digits.inner_text("#command") == "tcm sample digits --seeds 645 --class 3 --times 80,1.7"
    assert np.array_equal(shown(digits, "#large")[0], shown(digits, "#grid canvas")[5])


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", ["digits", "wide", "colours"])
def test_every_kind_of_model(request: pytest.FixtureRequest, pages: Path, name: str, steps: int) -> None:
    other = tcm.load(name if name == "digits" else pages / name)
    found = shown(go(request.getfixturevalue(name), f"#steps={steps}"), "#grid canvas")
    same_pixels(found, images_of(other, range(len(found)), steps=steps))


def test_a_mix_of_classes(digits: Page, model: tcm.Model) -> None:
    weights = torch.zeros(8, 10)
    weights[:, 3], weights[:, 8] = 0.75, 0.25
    expected = model.sample(8, condition=tcm.ClassMix(weights))
    go(digits, "#seed=0&class=3*75+8*25&steps=1")
    same_pixels(shown(digits, "#grid canvas")[:8], of_torch(expected))
    assert "75 % 3, 25 % 8" in digits.inner_text("#caption")
    assert digits.inner_text("#command") == ""


def test_the_ends_of_the_path_are_samples_of_its_seeds(digits: Page, model: tcm.Model) -> None:
    go(digits, "#steps=2")
    digits.fill("#from", "11")
    digits.fill("#to", "12")
    digits.press("#to", "Enter")
    settle(digits)
    ends = shown(digits, "#strip canvas")[[0, -1]]
    same_pixels(ends, images_of(model, range(11, 13), steps=2))
    digits.locator("#position").fill("1000")
    settle(digits)
    assert np.array_equal(shown(digits, "#way")[0], ends[1])


def test_halfway_is_on_the_arc(digits: Page, model: tcm.Model) -> None:
    ends = SampleStreams([11, 12]).normal((1, 8, 8))
    noise = (ends.double().sum(0, keepdim=True) * 0.5**0.5).float()
    mix = torch.zeros(1, 10)
    for label in tcm.Classes(10).draw([11, 12]).index.tolist():
        mix[0, label] += 0.5
    with torch.no_grad():
        expected = model.denoiser(80.0 * noise, torch.tensor([80.0]), tcm.ClassMix(mix))
    go(digits, "#seed=0&steps=1")
    digits.fill("#from", "11")
    digits.fill("#to", "12")
    digits.press("#to", "Enter")
    digits.locator("#position").fill("500")
    settle(digits)
    same_pixels(shown(digits, "#way"), of_torch(expected))


def test_a_picture_that_is_known_is_denoised_once(digits: Page, model: tcm.Model) -> None:
    go(digits, "#seed=20&class=4&steps=1")
    digits.click("#from-sample")
    digits.locator("#drawing-time").fill("100")
    settle(digits)
    t = float(digits.inner_text("#drawing-time-shown"))
    assert t == pytest.approx(80**0.5, rel=1e-2)
    picture = torch.from_numpy(shown(digits, "#yours")[:, :1].copy()).float() / 127.5 - 1
    noise = SampleStreams([20]).normal((1, 8, 8))
    with torch.no_grad():
        expected = model.denoiser(picture + t * noise, torch.tensor([t]), tcm.Labels(torch.tensor([4])))
    same_pixels(shown(digits, "#made"), of_torch(expected))


def test_what_is_unknown_is_made_from_noise_downwards(digits: Page, model: tcm.Model) -> None:
    go(digits, "#seed=30&class=2&steps=1")
    digits.click("#from-half")
    digits.locator("#drawing-time").fill("0")
    settle(digits)
    picture = torch.from_numpy(shown(digits, "#large")[:, :1].copy()).float() / 127.5 - 1
    known = torch.arange(64).view(1, 1, 8, 8) < 32
    streams, made = SampleStreams([30]), torch.zeros(1, 1, 8, 8)
    with torch.no_grad():
        for t in (80.0, 80.0 ** (2 / 3), 80.0 ** (1 / 3), 1.0):
            x_t = torch.where(known, picture, made) + t * streams.normal((1, 8, 8))
            made = model.denoiser(x_t, torch.tensor([t]), tcm.Labels(torch.tensor([2])))
    same_pixels(shown(digits, "#made"), of_torch(made))


def test_the_console_gives_pixels(digits: Page, model: tcm.Model) -> None:
    go(digits, "#steps=1")
    found = sampled(digits, [4, 2**40], steps=2, second=1.0).reshape(2, 1, 8, 8)
    expected = of_torch(model.sample(seeds=[4, 2**40], steps=2))
    same_pixels(found.repeat(3, 1), expected)

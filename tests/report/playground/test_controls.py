"""Each control does what it says, with a mouse, a finger and the keyboard; in both themes, at any width."""

import re
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from browsing import CHROMIUM
from PIL import Image
from playgrounds import go, opened, sampled, settle, shown
from playwright.sync_api import Browser, Page

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium here; on Debian: apt-get install chromium"),
]

SHIFTS = """new Promise(done => new PerformanceObserver(
    list => done(list.getEntries().map(entry => entry.value))).observe({type: "layout-shift", buffered: true}))"""
NAMELESS = """[...document.querySelectorAll("button, input, select, canvas[role], [role=option], [role=listbox]")]
    .filter(one => one.checkVisibility())
    .filter(one => !(one.ariaLabel || one.textContent.trim() || one.labels?.[0]?.textContent.trim()))
    .map(one => one.outerHTML)"""


@pytest.fixture
def page(digits: Page) -> Page:
    """The digits with their first settings."""
    return go(digits, "#seed=0&steps=1")


@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 400), ("light", 1280), ("dark", 1280)])
@pytest.mark.parametrize("name", ["digits", "wide", "colours"])
def test_fits_and_can_be_read(request: pytest.FixtureRequest, name: str, scheme: str, width: int) -> None:
    page = request.getfixturevalue(name)
    page.set_viewport_size({"width": width, "height": 900})
    in_scheme(page, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate(NAMELESS) == []
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
    assert len(ids) == len(set(ids))
    heights = page.evaluate("[...document.querySelectorAll('button')].map(one => one.getBoundingClientRect().height)")
    assert min(heights) > 32
    ground, ink = page.evaluate(
        "['backgroundColor', 'color'].map(key => getComputedStyle(document.body.parentNode)[key])"
    )
    assert (lightness(ground) > lightness(ink)) == (scheme == "light")


def test_the_visitor_can_choose_the_theme(page: Page) -> None:
    in_scheme(page, "light")
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = lightness(page.evaluate(ground))
    page.get_by_role("button", name="Use dark colours").click()
    assert lightness(page.evaluate(ground)) < 60 < light
    page.get_by_role("button", name="Use light colours").click()
    assert lightness(page.evaluate(ground)) == light


def in_scheme(page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    page.wait_for_function("scheme => document.documentElement.style.colorScheme === scheme", arg=scheme)


def has_address(page: Page, address: str) -> None:
    page.wait_for_function("address => location.hash === address", arg=address)


def lightness(colour: str) -> float:
    return sum(float(part) for part in re.findall(r"\d+", colour)[:3]) / 3


def test_seeds(page: Page) -> None:
    before = shown(page, "#grid canvas")
    page.click("#next")
    settle(page)
    assert page.input_value("#seed") == "64"
    assert not np.array_equal(shown(page, "#grid canvas"), before)
    page.click("#previous")
    settle(page)
    assert np.array_equal(shown(page, "#grid canvas"), before)
    page.fill("#seed", "3")
    page.press("#seed", "Enter")
    settle(page)
    assert np.array_equal(shown(page, "#grid canvas")[:61], before[3:])
    for wrong in ("-5", "1.5", "", "99999999999999999999"):
        page.fill("#seed", wrong)
        page.locator("#seed").blur()
        assert page.input_value("#seed") == "3"
    page.click("#random")
    assert page.input_value("#seed") != "3"
    assert re.fullmatch(r"[\d,.]+ images/s", page.inner_text("#speed"))


def test_classes_and_mixes(page: Page) -> None:
    chips = page.locator("#class-buttons")
    chips.get_by_role("button", name="7", exact=True).click()
    settle(page)
    one = shown(page, "#grid canvas")
    assert "class 7" in page.inner_text("#caption")
    has_address(page, "#seed=0&class=7&steps=1")
    chips.get_by_role("button", name="1", exact=True).click()
    assert page.locator("#class-buttons [aria-pressed=true]").all_inner_texts() == ["1"]
    page.check("#class-mix")
    chips.get_by_role("button", name="7", exact=True).click()
    settle(page)
    mixed = shown(page, "#grid canvas")
    page.get_by_label("7", exact=True).fill("20")
    settle(page)
    assert "83 % 1, 17 % 7" in page.inner_text("#caption")
    has_address(page, "#seed=0&class=1*100+7*20&steps=1")
    for other in (one, mixed):
        assert not np.array_equal(shown(page, "#grid canvas"), other)
    page.uncheck("#class-mix")
    assert page.locator("#class-buttons [aria-pressed=true]").all_inner_texts() == ["1"]
    chips.get_by_role("button", name="from the seed").click()
    settle(page)
    has_address(page, "#seed=0&steps=1")


def test_many_classes_are_a_list(colours: Page) -> None:
    colours.select_option("#class-list", "0")
    settle(colours)
    assert "class <b>red</b>" in colours.inner_text("#caption")
    assert colours.locator("#class-buttons [aria-pressed=true]").all_inner_texts() == ["<b>red</b>"]


def test_a_model_without_classes_has_no_such_field(wide: Page) -> None:
    go(wide, "#class=3")
    assert not wide.locator("#classes").is_visible()
    assert wide.inner_text("#caption") == "seed 0"
    assert wide.locator("#colour").is_visible()


def test_steps_and_the_second_time(page: Page) -> None:
    first = shown(page, "#grid canvas")
    assert page.locator("#second").is_disabled()
    page.check("#two")
    settle(page)
    second = shown(page, "#grid canvas")
    assert not np.array_equal(first, second)
    has_address(page, "#seed=0&steps=2&t2=1")
    page.locator("#second").fill("200")
    settle(page)
    assert page.inner_text("#second-shown") == "79.9"
    assert not np.array_equal(shown(page, "#grid canvas"), second)
    page.locator("#second").fill("0")
    settle(page)
    assert page.inner_text("#second-shown") == "1", "the model is undefined below"
    assert np.array_equal(shown(page, "#grid canvas"), second)


def test_only_the_newest_settings_are_computed(page: Page) -> None:
    page.evaluate("for (let i = 0; i < 40; i++) document.getElementById('next').click()")
    assert int(page.evaluate("document.body.dataset.waiting")) <= 3, "one batch of each part"
    settle(page)
    assert page.input_value("#seed") == str(40 * 64)
    has_address(page, f"#seed={40 * 64}&steps=1")
    expected = sampled(page, list(range(40 * 64, 41 * 64))).reshape(64, 8, 8)
    assert np.array_equal(shown(page, "#grid canvas")[:, 0], expected)


def test_a_link_shows_the_same(browser: Browser, pages: Path, page: Page) -> None:
    page.check("#two")
    page.click("#next")
    page.locator("#class-buttons").get_by_role("button", name="5", exact=True).click()
    page.locator("#grid [role=option]").nth(9).click()
    settle(page)
    address = "#seed=64&class=5&steps=2&t2=1&image=9"
    has_address(page, address)
    with opened(browser, pages / "digits.html", address) as other:
        assert np.array_equal(shown(other, "#grid canvas, #large"), shown(page, "#grid canvas, #large"))
        assert other.inner_text("#caption") == page.inner_text("#caption") == "seed 73, class 5"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("#link")
    page.wait_for_function("document.getElementById('said').textContent === 'Copied.'")
    assert page.evaluate("navigator.clipboard.readText()") == page.url


@pytest.mark.parametrize("address", ["#seed=-1&class=77&steps=9&t2=0.5&image=64", "#seed=x&class=3*-2&t2=80", "#%"])
def test_a_wrong_link_is_the_default(page: Page, address: str) -> None:
    expected = shown(page, "#grid canvas, #large")
    go(page, address)
    assert np.array_equal(shown(page, "#grid canvas, #large"), expected)


def test_saved_pictures_hold_the_pixels(page: Page) -> None:
    page.locator("#grid [role=option]").nth(2).click()
    for button, name, columns in (("#save", "digits-2.png", 1), ("#save-grid", "digits-0-63.png", 8)):
        with page.expect_download() as download:
            page.click(button)
        assert download.value.suggested_filename == name
        with Image.open(BytesIO(Path(download.value.path()).read_bytes())) as picture:
            saved = np.asarray(picture.convert("RGB"))
        images = shown(page, "#large" if columns == 1 else "#grid canvas")
        scale = 512 // (8 * columns)
        step = 8 * scale + (scale if columns > 1 else 0)
        assert saved.shape[0] == saved.shape[1] == step * columns - (step - 8 * scale)
        for index, image in enumerate(images):
            top, left = index // columns * step, index % columns * step
            cell = saved[top : top + 8 * scale : scale, left : left + 8 * scale : scale]
            assert np.array_equal(cell, image[:3].transpose(1, 2, 0))


def test_keys(page: Page) -> None:
    page.locator("#grid [aria-selected=true]").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowLeft"):  # the last but one ends at 8, the last at 7
        page.keyboard.press(key)
    assert page.locator("#grid [role=option]").nth(7).get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("seed 7")
    for key in ("n", "n", "b", "2"):
        page.keyboard.press(key)
    settle(page)
    assert (page.input_value("#seed"), page.is_checked("#two")) == ("64", True)
    page.keyboard.press("1")
    page.keyboard.press("r")
    assert (page.input_value("#seed") != "64", page.is_checked("#two")) == (True, False)
    page.focus("#seed")
    before = page.input_value("#seed")
    page.keyboard.press("n")
    assert page.input_value("#seed") == before


def test_the_film_plays_and_pauses(page: Page) -> None:
    page.click("#play")
    page.wait_for_function("document.getElementById('rate').textContent.endsWith('frames/s')")
    page.keyboard.press("p")
    assert page.inner_text("#play") == "Play"
    settle(page)
    before = shown(page, "#strip canvas")
    page.click("#other-ends")
    settle(page)
    assert not np.array_equal(shown(page, "#strip canvas"), before)
    page.locator("#strip canvas").nth(8).click()
    settle(page)
    assert np.array_equal(shown(page, "#way")[0], shown(page, "#strip canvas")[8])


def test_painting(page: Page) -> None:
    page.click("#clear")
    settle(page)
    assert not opaque(page).any()
    made = shown(page, "#made")
    paint(page, 2, 3)
    assert np.argwhere(opaque(page)).tolist() == [[3, 2]]
    assert shown(page, "#yours")[0, :3, 3, 2].tolist() == [255, 255, 255]
    assert not np.array_equal(shown(page, "#made"), made)
    page.locator("#shade").fill("0")
    page.locator("#brush").fill("2")
    paint(page, 2, 3)
    assert opaque(page).sum() > 1
    assert shown(page, "#yours")[0, :3, 3, 2].tolist() == [0, 0, 0]
    page.check("#erase")
    paint(page, 2, 3)
    assert not opaque(page).any()
    page.locator("#brush").fill("1")
    page.uncheck("#erase")
    box = page.locator("#yours").bounding_box()
    assert box is not None
    pixel = box["width"] / 8
    page.mouse.move(box["x"] + pixel / 2, box["y"] + pixel / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 7.5 * pixel, box["y"] + pixel / 2)  # in one move
    page.mouse.up()
    settle(page)
    assert opaque(page)[0].all(), "a stroke has no gaps"
    page.click("#clear")
    page.focus("#yours")
    for key in (" ", "ArrowUp", "ArrowLeft", " ", "Delete", "ArrowLeft", " "):  # from the middle
        page.keyboard.press(key)
    settle(page)
    assert np.argwhere(opaque(page)).tolist() == [[3, 2], [4, 4]]


def test_on_a_phone_nothing_moves_and_a_finger_paints(browser: Browser, pages: Path) -> None:
    with opened(browser, pages / "wide.html", viewport={"width": 400, "height": 900}, has_touch=True) as page:
        page.evaluate("document.body.style.paddingTop = '200px'")  # one shift, so that there is an entry to wait for
        *before, _ = page.evaluate(SHIFTS)
        assert sum(before) < 0.01, "as wide.html is drawn; a tenth is what people notice"
        page.click("#clear")
        page.locator("#colour").fill("#0080ff")
        box = page.locator("#yours").bounding_box()
        assert box is not None
        page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        settle(page)
        assert shown(page, "#yours")[0, :, 8, 16].tolist() == [0, 128, 255, 255]
        with page.expect_download() as download:
            page.click("#save-made")
        with Image.open(Path(download.value.path())) as picture:
            assert np.array_equal(np.asarray(picture)[::16, ::16, :3], shown(page, "#made")[0, :3].transpose(1, 2, 0))


def paint(page: Page, x: int, y: int) -> None:
    page.locator("#yours").scroll_into_view_if_needed()
    box = page.locator("#yours").bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + (x + 0.5) * box["width"] / 8, box["y"] + (y + 0.5) * box["height"] / 8)
    settle(page)


def opaque(page: Page) -> np.ndarray:
    return shown(page, "#yours")[0, 3] > 0

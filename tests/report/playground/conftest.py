"""Pages of three models, made once, and a browser that reports whatever they say or ask for."""

from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from once import once
from playgrounds import documented, opened
from playwright.sync_api import Browser, Page

import tcm
from tcm.cli.demo import playground_line
from tcm.cli.main import app
from tcm.foundation.errors import TcmError
from tcm.foundation.extras import how_to_install, is_installed
from tcm.networks import NetworkConfig
from tcm.report.playground.page import write_playground
from tcm.report.playground.runtime import CODE_FILE, WASM_FILE, Runtime, fetched_runtime

COLOURS = tcm.Classes(30, ("<b>red</b>", *(f"colour {index}" for index in range(1, 30))))


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    """The real library, kept in the user's cache."""
    try:
        return fetched_runtime()
    except TcmError as error:
        pytest.skip(str(error))


def lively_model(network: NetworkConfig, shape: tuple[int, int, int], **card: object) -> tcm.Model:
    """An untrained model whose images differ: fresh networks begin with outputs near zero."""
    torch.manual_seed(0)
    model = tcm.Model.fresh(tcm.ModelCard(network=network, image_shape=shape, **card))
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _make_pages(runtime: Runtime, folder: Path) -> None:
    library = folder / "node_modules" / "onnxruntime-web" / "dist"
    library.mkdir(parents=True)
    (library / CODE_FILE).write_bytes(runtime.code)
    (library / WASM_FILE).write_bytes(runtime.wasm)
    with chdir(folder):
        app(next(words for words in documented() if "--runtime" in words), standalone_mode=False)
    ddpmpp = tcm.DDPMppConfig(channels=8, channel_mult=(1, 2), blocks=1, attention=(16,))
    edm2 = tcm.EDM2Config(channels=16, channel_mult=(1, 2), blocks=1, attention=(8,))
    models = {
        "wide": lively_model(ddpmpp, (3, 16, 32), kind="el:ElStage"),
        "colours": lively_model(edm2, (3, 16, 16), kind="truncated", t_min=1.0, condition=COLOURS),
    }
    for name, model in models.items():
        model.save(folder / name)
    write_playground(models["colours"], "colours", "colours", runtime, folder / "colours.html")
    page = folder / "wide.html"  # as the demo writes it
    assert playground_line(folder / "wide", page) == f"To generate in your browser, open {page}"


@pytest.fixture(scope="session")
def pages(runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with digits.html, wide.html (RGB, no classes, down to t = 0.002) and colours.html (EDM2, 30 classes)."""
    if not is_installed("onnx"):
        pytest.skip(f"no onnx here; {how_to_install('onnx')}")
    return once(tmp_path_factory, "playgrounds", lambda folder: _make_pages(runtime, folder))


def _shared(name: str) -> Callable[..., Iterator[Page]]:
    """A page that is loaded once, which takes most of the time; each test sets what it needs."""

    @pytest.fixture(scope="session")
    def page(browser: Browser, pages: Path) -> Iterator[Page]:
        with opened(browser, pages / f"{name}.html") as page:
            yield page

    return page


digits, wide, colours = _shared("digits"), _shared("wide"), _shared("colours")

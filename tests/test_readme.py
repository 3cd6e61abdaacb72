"""The README does what it says: its commands are run, or parsed where they would take hours; its Python is run."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from launching import Launcher
from PIL import Image
from weights.module_pickles import CC_BY_NC_SA, network_pickle

import tcm

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(sh|python)\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
COMMANDS = [
    line.split("  #")[0].strip() for kind, text in BLOCKS if kind == "sh" for line in text.splitlines() if line.strip()
]
TOO_LONG = ("tcm data fetch", "tcm eval", "tcm train cifar10 ", "torchrun", "tcm export", "tcm push")
"""Commands that need the network, what it has brought, or hours: with --help, which parses every option and stops.
So are exports, which the tests of docs/export.md run."""


def run(arguments: list[str], folder: Path) -> None:
    if arguments[0] == "tcm":
        code, text = Launcher(folder, inside=folder).run(*arguments[1:])
        assert code == 0, f"{shlex.join(arguments)}\n{text}"
        return
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with what the README's reader has: photos, and a published checkpoint."""
    place = tmp_path_factory.mktemp("readme")
    rng = np.random.default_rng(0)
    for kind in ("cats", "dogs"):
        (place / "photos" / kind).mkdir(parents=True)
        for number in range(3):
            pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(place / "photos" / kind / f"{number}.png")
    # Where hours of training would have left a model, an untrained one of the same kind.
    network = tcm.DDPMppConfig(channels=8, channel_mult=(1, 2), blocks=1, attention=())
    card = tcm.ModelCard(kind="truncated", network=network, image_shape=(3, 32, 32), t_min=1.0)
    tcm.Model.fresh(card).save(place / "runs" / "photos" / "2-truncated" / "model")
    (place / "runs" / "photos" / "recipe.toml").touch()
    return place


def as_run_here(command: str) -> list[str]:
    """The command as it can be run in a test."""
    words = shlex.split(command)
    if words[0] == "make":
        return ["make", "--dry-run", "-C", str(ROOT), *words[1:]]
    if command.startswith(TOO_LONG):
        words.append("--help")
    elif "train" in words:
        words.append("--dry-run")
    if words[0] == "torchrun":
        words[words.index("--nproc-per-node") + 1] = "1"
        return [sys.executable, "-m", "torch.distributed.run", *words[1:]]
    return words


@pytest.mark.parametrize("command", [command for command in COMMANDS if not command.startswith(". ")])
def test_command(command: str, folder: Path, golden) -> None:
    if command.startswith("tcm import"):
        tensors, arguments = golden("ddpmpp_uncond_16")
        weights = {name.removeprefix("weights."): w for name, w in tensors.items() if name.startswith("weights.")}
        pickled = network_pickle(weights, arguments, CC_BY_NC_SA, "EDMPrecond", ("model", "SongUNet"))
        (folder / shlex.split(command)[2]).write_bytes(pickled)
    run(as_run_here(command), folder)


def test_python(folder: Path) -> None:
    for kind, text in BLOCKS:
        if kind == "python":
            run([sys.executable, "-c", text], folder)


def test_links() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []

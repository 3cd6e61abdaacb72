"""`tcm doctor`: what this machine offers."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from tcm.foundation.errors import TcmError
from tcm.foundation.extras import EXTRAS, how_to_install

if TYPE_CHECKING:
    import torch

BFLOAT16 = "for diffusion stages and sampling; too coarse for consistency stages (docs/training.md)"


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False) -> None:
    """Show what this machine offers, and how to get what it lacks."""
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    found = findings()
    if as_json:
        typer.echo(json.dumps(dict(found), indent=2))
        return
    table = Table(title="tcm doctor", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, finding in found:
        table.add_row(name, escape(finding))
    Console().print(table)


def findings() -> list[tuple[str, str]]:
    """Each thing that matters for training and sampling, with what was found; a broken torch is an error."""
    import torch

    from tcm.foundation.devices import available_devices, best_device, has_fast_bfloat16

    device = best_device()
    rows = [
        ("tcm", version("truncated-consistency")),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}; {_check_torch(device)}"),
        ("devices", ", ".join(available_devices()) + f"; default {device.type}"),
        ("bfloat16", f"{'native' if has_fast_bfloat16(device) else 'emulated, and slow'}; {BFLOAT16}"),
        ("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores; {_best_threads()}"),
        ("distributed", "torchrun available" if torch.distributed.is_available() else "not in this torch build"),
    ]
    if find_spec("torchvision") is not None and not _torchvision_works():
        raise TcmError("the installed torchvision does not work with this torch; run `pip uninstall torchvision`")
    return rows + [(f"extra {name}", _extra(name, packages)) for name, packages in EXTRAS.items()]


def _check_torch(device: torch.device) -> str:
    """Compute something whose result is known, forward and backward."""
    import torch

    x = torch.full((4, 4), 2.0, device=device, requires_grad=True)
    torch.autograd.backward((x @ x).sum())
    if x.grad is None or not torch.equal(x.grad, torch.full_like(x, 16.0)):
        raise TcmError(f"torch {torch.__version__} computes wrong gradients on {device}; reinstall torch")
    return "computes"


def _best_threads() -> str:
    """What suits a small and a larger network at the moment, by sampling from models of the package."""
    from functools import partial

    import torch

    from tcm.foundation.processes import Processes
    from tcm.foundation.threads import Threads, threads_restored, usable_counts
    from tcm.weights import load

    if "OMP_NUM_THREADS" in os.environ:
        return f"fixed by OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}"
    best = []
    for name in ("digits", "fashion-mnist"):
        with threads_restored():
            threads = Threads(usable_counts(Processes(torch.device("cpu"))))
            threads.settle(partial(load(name).sample, 64), 64)
            best.append(f"{threads.describe()} for sampling {name}")
    return f"best now: {'; '.join(best)}"


def _torchvision_works() -> bool:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        return False
    return True


def _extra(name: str, packages: tuple[str, ...]) -> str:
    found, missing = [], []
    for package in packages:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            missing.append(package)
    if not missing:
        return ", ".join(found)
    return f"{', '.join(missing)} missing: {how_to_install(name)}"

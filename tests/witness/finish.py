"""What becomes of the recorded runs, and what the models of the package draw: computed in a process of its own.

The process computes with the instructions that every x86 CPU has. So the same bits can be expected where `arithmetic`
agrees; elsewhere (another kind of CPU, another version of torch) results agree up to rounding.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).parent
RECORDED = HERE / "results.safetensors"
CUTS = {
    "three_stages": ("0-diffusion", "1-consistency", "2-truncated"),
    "tangents": ("2-truncated",),
    "duet": ("1-duet",),
}
"""The recipes, and the stages in whose middle a copy of the run was cut off."""
PORTABLE = os.environ | {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)]),
}


def finish(folder: Path) -> dict[str, Tensor]:
    """Train or resume the runs in a folder, each named `recipe` or `recipe-stage`; the weights, samples, arithmetic."""
    file = folder / RECORDED.name
    subprocess.run([sys.executable, __file__, str(folder), str(file)], env=PORTABLE, check=True, capture_output=True)
    return load_file(file)


def _run(*command: str | Path) -> None:
    from tcm.cli import main

    sys.argv = ["tcm", *map(str, command)]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def _weights(run: Path, stages: tuple[str, ...]) -> dict[str, Tensor]:
    """Those of the stages that the run was cut in, or that it had not begun."""
    files = sorted(file for stage in stages for file in (run / stage).rglob("*.safetensors"))
    models = [file for file in files if "state" not in file.relative_to(run).parts]
    parent = run.parent
    return {f"{file.relative_to(parent)} {name}": tensor for file in models for name, tensor in load_file(file).items()}


def _samples() -> dict[str, Tensor]:
    import tcm

    return {
        f"{name} in {steps}": tcm.load(name).sample(3, steps=steps, seed=7)
        for name in ("digits", "fashion-mnist", "cifar10-16")
        for steps in (1, 2)
    }


def _exports() -> dict[str, Tensor]:
    """What an exported graph computes, and the weights for diffusers."""
    from onnxruntime import InferenceSession

    with TemporaryDirectory() as work:
        folder = Path(work)
        for form in ("onnx", "diffusers"):
            _run("export", "digits", "--to", form, "--out", folder / form)
        x = torch.linspace(-3, 3, 128).view(2, 1, 8, 8)
        given = {"x": x.numpy(), "t": np.array([1.5, 60.0], np.float32), "label": np.array([3, 8])}
        (f,) = InferenceSession(folder / "onnx" / "f.onnx").run(None, given)
        weights = load_file(folder / "diffusers" / "unet" / "diffusion_pytorch_model.safetensors")
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    return {"onnx f": torch.from_numpy(f), "diffusers": torch.tensor(list(digest.digest()))}


def _arithmetic() -> Tensor:
    """Elementary operations and their gradients, by which we know whether the same bits can be expected."""
    torch.manual_seed(0)
    x = torch.randn(4, 8, 8, 8, requires_grad=True)
    layers = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 8, 1))
    y = layers(x).flatten(1)
    z = torch.cat([y @ y.T, y.exp().log1p().sqrt(), torch.sin(y), torch.softmax(y, 1), torch.sigmoid(y)], 1)
    z.square().sum().backward()
    assert x.grad is not None
    in_float64 = torch.special.ndtri(torch.linspace(0.1, 0.9, 64, dtype=torch.float64)).exp().log().view(torch.float32)
    return torch.cat(
        [x.grad.flatten(), *(p.grad.flatten() for p in layers.parameters()), z.detach().flatten(), in_float64]
    )


def _main(folder: Path, file: str) -> None:
    tensors = {"arithmetic": _arithmetic()} | _samples() | _exports()
    for run in sorted(folder.iterdir()) or [folder / name for name in CUTS]:
        recipe = run.name.partition("-")[0]
        _run("train", HERE / f"{recipe}.toml", "--run", run)
        tensors |= _weights(run, CUTS[recipe])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), sys.argv[2])

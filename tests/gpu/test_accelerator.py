"""What only an accelerator can show: its numbers, its kernels, its collectives.

Losses on it agree with the CPU's, which the rest of the suite compares with the truth.
"""

from pathlib import Path

import pytest
import torch
from inprocess import train
from launching import FOLDERS, STAGES, Launcher, fingerprint, losses, tiny, tiny_recipe
from torch.nn.functional import cosine_similarity

import tcm
from tcm.foundation.processes import Processes
from tcm.method.conditions import Labels
from tcm.method.objectives import Draw
from tcm.method.preconditioning import column
from tcm.method.tangents import tangent
from tcm.networks.forward_mode import attend
from tcm.weights.edm_names import load_denoiser

LOG_ALL = [f"{stage}.log_every=1" for stage in STAGES]
SHORT = [*LOG_ALL, *(f"{stage}.sample_every=0" for stage in STAGES)]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("launched"))


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of all stages on the CPU, without dropout, whose masks belong to the device."""
    folder = tmp_path_factory.mktemp("cpu") / "run"
    train(tiny_recipe(8, "network.dropout=0.0", *SHORT), folder)
    return folder


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@pytest.mark.parametrize("name", ["ddpmpp_uncond_16", "edm2_cond_16"])
def test_golden_network(golden, device: torch.device, name: str) -> None:
    """To 1e-4, which TF32 would miss by far."""
    tensors, arguments = golden(name)
    denoiser = load_denoiser(part(tensors, "weights."), arguments).to(device)
    labels = Labels(tensors["in.labels"].argmax(1)).to(device) if "in.labels" in tensors else None
    with torch.no_grad():
        denoised = denoiser(tensors["in.x"].to(device), tensors["in.t"], labels).cpu()
    torch.testing.assert_close(denoised, tensors["out.denoised"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("arithmetic", [None, torch.bfloat16, torch.float16])
def test_the_derivative_along_a_trajectory(device: torch.device, arithmetic: torch.dtype | None) -> None:
    """That of the CPU in fp32; times stay on the CPU."""
    model = tcm.load("digits")
    f, x, eps = model.denoiser, *torch.randn(2, 4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    t, labels = torch.tensor([1.0, 2.0, 9.0, 80.0], dtype=torch.float64), Labels(torch.arange(4))
    known = tangent(f, x + column(t, x) * eps, t, eps, labels).flatten(1)
    f.to(device).network.arithmetic = arithmetic
    found = tangent(f, (x + column(t, x) * eps).to(device), t, eps.to(device), labels.to(device)).flatten(1).cpu()
    assert float(cosine_similarity(found, known).min()) > (0.9999 if arithmetic is None else 0.995)


def test_golden_truncated_loss(golden, device: torch.device) -> None:
    tensors, settings = golden("loss_stage2_cifar")
    student, frozen = (load_denoiser(part(tensors, f"{role}."), settings).to(device) for role in ("student", "frozen"))
    pairs = tcm.Pairs(tcm.Curriculum(d=0, limit=settings["ratio"]), tcm.PseudoHuber(settings["c"]))
    objective = tcm.TruncatedConsistency(
        tcm.LogStudentT(0, 0.2, 1.0), pairs, settings["t_prime"], settings["w_b"], settings["rho"]
    )
    batch = tcm.Batch.whole(tensors["in.x"].to(device))
    draw = Draw(tensors["in.t"].double(), tensors["in.eps"].to(device), None, None)
    found = objective.loss_at({"student": student, "frozen": frozen}, batch, 0, draw)
    assert float(found.total.detach()) == pytest.approx(float(tensors["out.total"]), rel=5e-3)


def test_all_stages_as_on_the_cpu(device: torch.device, on_the_cpu: Path, tmp_path: Path) -> None:
    """The noise of a seed is the same on every device, so the losses agree."""
    train(tiny_recipe(8, "network.dropout=0.0", *SHORT), tmp_path / "run", processes=Processes(device))
    for folder in FOLDERS:
        assert losses(tmp_path / "run" / folder) == pytest.approx(losses(on_the_cpu / folder), rel=1e-2), folder


def test_samples_as_on_the_cpu(device: torch.device) -> None:
    expected = tcm.load("digits").sample(8, steps=2, seed=3)
    torch.testing.assert_close(tcm.load("digits").to(device).sample(8, steps=2, seed=3), expected, rtol=1e-3, atol=1e-3)


def test_stopped_and_resumed(device: torch.device, launcher: Launcher, tmp_path: Path) -> None:
    """Bit for bit, with deterministic kernels; with dropout, whose masks come from the device's own generator."""
    words = ("train", "digits", *tiny(12, *SHORT), "--device", str(device), "--deterministic", "--run")
    assert launcher.run(*words, str(tmp_path / "straight"))[0] == 0
    stopped = launcher.start(*words, str(tmp_path / "resumed"))
    metrics = tmp_path / "resumed" / FOLDERS[1] / "metrics.jsonl"
    stopped.until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 5)
    stopped.send(9)
    stopped.wait()
    code, text = launcher.run(*words, str(tmp_path / "resumed"))
    assert code == 0, text
    assert fingerprint(tmp_path / "resumed") == fingerprint(tmp_path / "straight")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(device: torch.device, tmp_path: Path, precision: str) -> None:
    words = ('order=["diffusion"]', "diffusion.log_every=10", "diffusion.sample_every=0")
    for name in (precision, "fp32"):
        recipe = tiny_recipe(60, *words, f"diffusion.precision={name}")
        train(recipe, tmp_path / name, processes=Processes(device))
    half, full = (losses(tmp_path / name / FOLDERS[0]) for name in (precision, "fp32"))
    assert half == pytest.approx(full, rel=0.05)


def test_compiled(device: torch.device, tmp_path: Path) -> None:
    words = ('order=["diffusion"]', "network.channel_mult=[1]", "diffusion.log_every=1", "diffusion.sample_every=0")
    train(tiny_recipe(3, *words), tmp_path / "eager", processes=Processes(device))
    train(tiny_recipe(3, *words, "diffusion.compile=true"), tmp_path / "compiled", processes=Processes(device))
    eager, compiled = (losses(tmp_path / name / FOLDERS[0]) for name in ("eager", "compiled"))
    assert compiled == pytest.approx(eager, rel=1e-3)


@pytest.mark.usefixtures("two_devices")
@pytest.mark.parametrize("sharding", [(), ("--shard",)], ids=["replicated", "sharded"])
def test_two_processes(launcher: Launcher, on_the_cpu: Path, tmp_path: Path, sharding: tuple[str, ...]) -> None:
    """DDP and FSDP2 over the accelerator's own collectives."""
    words = ("train", "digits", *tiny(8, "network.dropout=0.0", *SHORT), "--run", str(tmp_path / "run"), *sharding)
    ended = launcher.run_ranks(2, *words)
    assert [code for code, _ in ended] == [0, 0], ended
    for folder in FOLDERS:
        assert losses(tmp_path / "run" / folder) == pytest.approx(losses(on_the_cpu / folder), rel=1e-2), folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_fused(device: torch.device, dtype: torch.dtype) -> None:
    """One head of 256 channels at 16 × 16 as in CIFAR-10's network, and heads of 64 as in EDM2."""
    for heads, width in ((1, 256), (6, 64)):
        q, k, v = torch.randn(3, 2, heads, 256, width, device=device, dtype=dtype)
        with torch.profiler.profile() as profile:
            attend(q, k, v)
        names = {event.key for event in profile.key_averages()}
        assert "aten::_scaled_dot_product_attention_math" not in names, names

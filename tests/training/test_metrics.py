"""metrics.jsonl: what is in it, and that neither crashes nor returns leave a step twice."""

import json
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from inprocess import begin, events, train
from launching import FOLDERS, lines, tiny_recipe

from tcm.foundation.errors import TcmError
from tcm.training.checkpoint import Checkpoints
from tcm.training.metrics import MetricsFile, Window, read_metrics, time_bins
from tcm.training.run import RunOptions
from tcm.training.stage_loop import StageLoop
from tcm.training.trackers import TrackerName, open_tracker
from tcm.training.trainer import Trainer

COMMON = {
    "step", "loss", "gradient_norm", "gradient_norm_max", "images_per_second", "loss_by_t", "learning_rate",
    "skipped", "memory",
}  # fmt: skip
PARTS = ({"denoising"}, {"consistency", "ratio"}, {"consistency", "boundary", "ratio"})


def test_fields(finished: Path) -> None:
    for folder, parts in zip(FOLDERS, PARTS, strict=True):
        written = read_metrics(finished / folder / "metrics.jsonl")
        windows = [line for line in written if "loss" in line]
        assert [line["step"] for line in windows] == [2, 4, 6, 8, 10, 12]
        assert all(line.keys() == COMMON | parts for line in windows)
        assert [line["step"] for line in written if "spread" in line] == ([12] if "diffusion" in folder else [6, 12])
        assert all(line["images_per_second"] > 0 and line["memory"] > 10**7 for line in windows)


def test_the_parts_make_the_loss(finished: Path) -> None:
    for line in lines(finished / "2-truncated"):
        if "loss" in line:
            assert line["loss"] == pytest.approx(0.1 * line["boundary"] + line["consistency"], rel=1e-5)


def test_the_loss_by_t_averages_to_the_loss(tmp_path: Path) -> None:
    """One bin at a time, weighted by how many of the samples fell into it."""
    loop, _ = begin(tmp_path, "diffusion", lambda objective: objective, "diffusion.log_every=1")
    record = loop.trainer.step(0, loop.batches.at(0))
    sums, counts = record.bins[:10], record.bins[10:]
    assert sum(counts) == 16
    assert sum(sums) / 16 == pytest.approx(record.numbers["loss"], rel=1e-5)
    edges = time_bins(0.002, 10.0)
    assert (float(edges[0]), float(edges[-1])) == pytest.approx((0.002, 10.0))
    torch.testing.assert_close(edges[1:] / edges[:-1], (edges[1] / edges[0]).expand(10))


def test_a_window_averages() -> None:
    window = Window()
    window.add({"loss": 1.0, "gradient_norm": 2.0}, [1.0] * 10 + [2.0] * 10, images=8)
    window.add({"loss": 3.0, "gradient_norm": 6.0}, [0.0] * 10 + [0.0] * 10, images=8)
    summary = window.summary()
    assert (summary["loss"], summary["gradient_norm"], summary["gradient_norm_max"]) == (2.0, 4.0, 6.0)
    assert summary["loss_by_t"] == [0.5] * 10
    assert Window().bin_counts == [0.0] * 10


def test_a_window_averages_each_number_over_the_steps_that_have_it() -> None:
    window = Window()
    window.add({"fake.loss": 1.0, "fake.gradient_norm": 5.0, "loss": 7.0, "gradient_norm": 2.0}, [1.0] * 20, images=8)
    window.add({"fake.loss": 2.0, "fake.gradient_norm": 4.0}, [0.0] * 20, images=8)
    summary = window.summary()
    assert (summary["fake.loss"], summary["loss"], summary["gradient_norm"]) == (1.5, 7.0, 2.0)
    assert (summary["fake.gradient_norm_max"], summary["gradient_norm_max"]) == (5.0, 2.0)


def test_the_speed_is_that_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock where a step takes a second, a sample grid a minute and a checkpoint an hour."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def takes(seconds: float, owner: type, name: str) -> None:
        original = getattr(owner, name)

        def timed(*arguments: object) -> object:
            nonlocal now
            now += seconds
            return original(*arguments)

        monkeypatch.setattr(owner, name, timed)

    takes(1.0, Trainer, "step")
    takes(60.0, StageLoop, "_sample")
    takes(3600.0, Checkpoints, "save")
    loop, stop = begin(
        tmp_path, "diffusion", lambda objective: objective, "diffusion.log_every=5", "diffusion.sample_every=6"
    )
    assert loop.run(stop)
    written = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in written if "spread" in line] == [6, 12]
    speeds = {line["step"]: line["images_per_second"] for line in written if "loss" in line}
    assert speeds == pytest.approx(dict.fromkeys((5, 10, 12), 16.0))
    assert now > 4 * 3600


def test_rewind(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in (2, 4, 6):
        file.write({"step": step, "loss": 1.0})
    file.write({"step": 6, "event": "skipped"})
    file.rewind(4, keep_events=True)
    file.write({"step": 5, "loss": 2.0})
    assert [(line["step"], line.get("event")) for line in read_metrics(path)] == [
        (2, None), (4, None), (6, "skipped"), (5, None),
    ]  # fmt: skip
    file.rewind(4, keep_events=False)
    file.close()
    assert [line["step"] for line in read_metrics(path)] == [2, 4]


@given(st.lists(st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False)), max_size=4), st.integers(1, 200))
def test_a_cut_last_line_is_left_out(tmp_path_factory: pytest.TempPathFactory, written: list[dict], cut: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    text = "".join(json.dumps({"step": 0} | line) + "\n" for line in written)
    path.write_text(text[:-cut])
    whole = text[:-cut].count("\n")
    kept = read_metrics(path)
    assert len(kept) in (whole, whole + 1)  # a last line may lack no more than its end
    assert kept == [{"step": 0} | line for line in written][: len(kept)]


def test_a_cut_line_does_not_stop_a_resume(tmp_path: Path) -> None:
    loop, stop = begin(tmp_path, "diffusion")
    assert loop.run(stop)
    whole = lines(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 14, "lo')
    loop, stop = begin(tmp_path, "diffusion")
    assert loop.run(stop)
    assert lines(tmp_path) == whole


def test_tensorboard_writes_real_events(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = tiny_recipe(6, 'order=["diffusion"]')
    train(recipe, tmp_path / "run", RunOptions(trackers=(TrackerName.TENSORBOARD,)))
    reader = accumulator.EventAccumulator(str(tmp_path / "run" / "0-diffusion" / "tensorboard"))
    reader.Reload()
    shown = {event.step: event.value for event in reader.Scalars("loss")}
    written = {line["step"]: line["loss"] for line in lines(tmp_path / "run" / "0-diffusion") if "loss" in line}
    assert shown == pytest.approx(written)
    assert {"gradient_norm", "learning_rate", "images_per_second"} <= set(reader.Tags()["scalars"])


@pytest.mark.parametrize("name", [TrackerName.WANDB, TrackerName.TRACKIO])
def test_a_missing_tracker(tmp_path: Path, name: TrackerName) -> None:
    try:
        __import__(name.value)
        pytest.skip(f"{name.value} is installed")
    except ImportError:
        pass
    message = f"track={name.value} needs the package {name.value}; run `pip install -e '.\\[track\\]'`"
    with pytest.raises(TcmError, match=message):
        open_tracker(name, tmp_path / "run" / "0-diffusion")


def collapse_of(loop: StageLoop, folder: Path) -> list[dict]:
    loop._sample(6, loop.batches.at(0), done=False)
    return [event for event in events(folder) if event["event"] == "collapse"]


def test_a_constant_model_is_a_collapse(tmp_path: Path) -> None:
    """c_skip x + c_out F with F = 0 gives nearly the same picture for every noise at T."""
    loop, _ = begin(tmp_path, "truncated", lambda objective: objective, "network.dropout=0.0")
    for average in loop.trainer.learner.averages:
        for name, tensor in average.state_dict().items():
            if name.startswith("network.") and tensor.is_floating_point():
                tensor.zero_()
    (event,) = collapse_of(loop, tmp_path)
    assert "one-step samples hardly differ" in event["reason"]
    assert event["reason"].endswith("raise w_b or rho")


def test_a_model_with_varied_samples_is_none(tmp_path: Path) -> None:
    loop, _ = begin(tmp_path, "truncated", lambda objective: objective)
    for average in loop.trainer.learner.averages:
        for name, tensor in average.state_dict().items():
            if name.startswith("network.") and tensor.ndim == 4:
                torch.nn.init.kaiming_normal_(tensor)
    assert collapse_of(loop, tmp_path) == []


def test_sampling_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    """The average takes the student's place for the samples, and is taken out again, bit for bit."""
    loop, stop = begin(tmp_path, "diffusion")
    assert loop.run(stop)
    before = {name: tensor.clone() for name, tensor in loop.trainer.tensors().items()}
    with loop.trainer.averaged():
        during = loop.trainer.student.state_dict()
        assert all(torch.equal(during[name], before[f"average.0.{name}"]) for name in during)
        assert any(not torch.equal(during[name], before[f"student.{name}"]) for name in during)
    after = loop.trainer.tensors()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)

"""The benchmarks: their arithmetic, the page they write, and one of them in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import Row, Settings, interleave, number, peak_bytes, ratio, save, share
from benchmarks.rounding import EmulatedTF32, round_to_tf32

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]


def test_contestants_take_turns_in_changing_order() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = interleave(Settings(), runs, rounds=3, warm=1)
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}


def test_ratios_are_taken_within_each_round() -> None:
    """A machine that is three times as slow in one round changes no ratio."""
    row = ratio("a / b", [1.0, 3.0, 1.1], [2.0, 6.0, 2.0])
    assert (row.value, row.low, row.high) == (0.5, 0.5, pytest.approx(0.55))
    assert share("a", [1.0, 3.0], [4.0, 12.0]).value == 25


def test_a_fresh_process_holds_nothing_from_before() -> None:
    held = torch.ones(100_000_000)
    assert harness.in_fresh_process(peak_bytes) + 300_000_000 < peak_bytes()
    assert held.nbytes == 400_000_000


def test_results_are_written_as_json_and_into_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "performance.md"
    page.write_text(f"before\n{harness.BEGIN}\nold\n{harness.END}\nafter\n")
    monkeypatch.setattr(harness, "PAGE", page)
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    rows = [Row("a / b", 0.98765, "×", 0.9, 1.1, "≤ 1.03"), Row("hidden", 1.0, detail=True)]
    save("stages", "one against the other", rows, Settings(), 12.3)
    assert json.loads((tmp_path / "results" / "stages.json").read_text())["rows"][0]["value"] == 0.98765
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "hidden" not in text
    assert "| a / b | 0.988 × | 0.9 to 1.1 | ≤ 1.03 |" in text
    assert "| `stages`: a / b | 0.988 × | 0.9 to 1.1 | ≤ 1.03 |" in text, "among the goals too"


def test_numbers_have_three_digits() -> None:
    assert [number(value) for value in (0.98765, 12.345, 123456.0)] == ["0.988", "12.3", "123,456"]


def test_tf32_is_emulated_by_rounding_operands_to_ten_bits() -> None:
    """Ties go to even; convolutions compute with rounded operands, forward and backward; nothing else is rounded."""
    bit = 2.0**-10
    x = torch.tensor([1 + bit, 1 + bit / 2, 1 + 1.5 * bit, 1 + 0.51 * bit, -(1 + 0.51 * bit), 0.0, 3e-30])
    expected = [1 + bit, 1.0, 1 + 2 * bit, 1 + bit, -(1 + bit), 0.0]
    assert round_to_tf32(x)[:-1].tolist() == expected
    assert float(round_to_tf32(x)[-1]) == pytest.approx(3e-30, rel=2**-11)
    image, weight = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3, requires_grad=True)
    with EmulatedTF32():
        out = torch.nn.functional.conv2d(image, weight)
        (found,) = torch.autograd.grad(out.square().sum(), weight)
        assert torch.equal(image + image, 2 * image)
    rounded = round_to_tf32(weight.detach()).requires_grad_()
    expected_out = torch.nn.functional.conv2d(round_to_tf32(image), rounded)
    torch.testing.assert_close(out, expected_out)
    (exact,) = torch.autograd.grad(expected_out, rounded, round_to_tf32(2 * expected_out.detach()))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_quick_benchmark_measures_and_writes_nothing() -> None:
    before = {file: file.read_bytes() for file in (ROOT / "benchmarks" / "results").glob("*.json")}
    command = [sys.executable, "-m", "benchmarks", "--quick", "optimizer"]
    environment = os.environ | {"COLUMNS": "200", "PATH": ""}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "gradient norm, foreach, of the step" in done.stdout
    assert before == {file: file.read_bytes() for file in (ROOT / "benchmarks" / "results").glob("*.json")}

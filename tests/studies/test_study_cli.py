"""`tcm study` as a user calls it."""

import json
import tomllib

import pytest
from typer.testing import CliRunner

from tcm.cli import app
from tcm.foundation.errors import TcmError
from tcm.studies.resolve import shipped_studies


def invoke(*words: str) -> str:
    result = CliRunner().invoke(app, ["study", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("list")
    for name in shipped_studies():
        assert f" {name} " in text
    assert "9 × 5" in text
    assert "…" not in text
    listed = {study["name"]: study for study in json.loads(invoke("list", "--json"))}
    assert sorted(listed) == shipped_studies()
    assert listed["boundary"]["stages"] == (2 + 9) * 5, "stages 0 and 1 are shared"


def test_show() -> None:
    shown = tomllib.loads(invoke("show", "boundary"))
    assert shown["variants"]["rho = 0.5, w_b = 1.0"]["overrides"] == ["truncated.rho=0.5", "truncated.w_b=1.0"]
    assert json.loads(invoke("show", "boundary", "--json"))["measure"]["count"] == 5000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seeds", "three"], "--seeds three is neither a number nor a list of seeds; write 3, or 0,1,2"),
        (["--seeds", "0"], "--seeds 0 must be at least 1; to run seed 0 alone, write 0 with a comma: --seeds 0,"),
        (["--seeds", "1,1"], "--seeds 1,1 gives a seed twice; give each seed once"),
        (["--part", "5/4"], "--part 5/4 is not a share; write 1/4 for the first of four, up to 4/4"),
        (["--part", "0/4"], "--part 0/4 is not a share"),
        (["--device", "cpu:0"], "--device cpu:0 names a single device"),
        (["--part", "half"], "--part half is not a share"),
    ],
)
def test_wrong_options(words: list[str], message: str) -> None:
    with pytest.raises(TcmError) as error:
        invoke("run", "t-prime", "--out", "nowhere", *words)
    assert message in str(error.value)

"""`rounds` are short for stages in a row: what they become, and what is refused."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tcm.cli.main import app
from tcm.foundation.errors import TcmError
from tcm.recipes.lineage import offset_of, roles_of, source_stage
from tcm.recipes.resolve import differences, resolve, to_toml
from tcm.recipes.schema import Recipe
from tcm.recipes.tables import toml_value

STAGE: dict[str, Any] = {
    "objective": "consistency",
    "steps": 7,
    "batch": 8,
    "learning_rate": 1e-3,
    "curriculum": {"d": 3, "limit": 0.9},
    "averages": [{"kind": "constant", "decay": 0.5}],
}


def recipe_of(stages: dict[str, dict[str, Any]], *overrides: str, head: str = "") -> Recipe:
    """`digits` with more stages, as a file has them."""
    tables = [
        "\n".join([f"[stages.{name}]", *(f"{key} = {toml_value(value)}" for key, value in table.items())])
        for name, table in stages.items()
    ]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "mine.toml"
        file.write_text("\n".join(['extends = "digits"', head, *tables]), "utf-8")
        return resolve(str(file), overrides)


keys = st.fixed_dictionaries(
    {},
    optional={
        "steps": st.integers(1, 100),
        "learning_rate": st.floats(1e-6, 1.0),
        "clip": st.just("none") | st.floats(0.1, 10),
        "curriculum": st.fixed_dictionaries({}, optional={"limit": st.floats(0.5, 0.99), "k": st.floats(0, 9)}),
        "distance": st.just({"kind": "squared_l2"}) | st.just({"kind": "pseudo_huber", "c": 0.1}),
        "averages": st.just([{"kind": "power", "gamma": 6.94}]),
    },
)


@settings(max_examples=20)
@given(st.lists(keys, min_size=1, max_size=4))
def test_rounds_are_stages_written_out(rounds: list[dict[str, Any]]) -> None:
    """A round's keys replace the stage's; tables of the same kind are merged."""
    short = recipe_of({"more": STAGE | {"rounds": rounds}})
    written = {
        f"more-{number}": STAGE | own | {"curriculum": STAGE["curriculum"] | own.get("curriculum", {})}
        for number, own in enumerate(rounds, 1)
    }
    long = recipe_of(written)
    assert list(short.stages) == ["diffusion", "consistency", "truncated", *written]
    assert differences(short, long) == []
    assert short == long
    with TemporaryDirectory() as folder:
        file = Path(folder) / "mine.toml"
        file.write_text(to_toml(short), "utf-8")
        assert resolve(str(file)) == short


def test_each_round_starts_from_the_one_before() -> None:
    averages = {"averages": [{"kind": "power", "gamma": 6.94}], "schedule_offset": "continue"}
    recipe = recipe_of({"more": STAGE | averages | {"rounds": [{"schedule_offset": 0}, {"steps": 5}, {}]}})
    names = ["more-1", "more-2", "more-3"]
    sources = [source_stage(recipe, name, roles_of(recipe, name)["student"]) for name in names]
    assert sources == ["truncated", "more-1", "more-2"]
    assert [offset_of(recipe, name) for name in names] == [0, 7, 12]


def test_order_and_other_stages_name_them() -> None:
    stages = {
        "more": STAGE | {"rounds": [{}, {}]},
        "last": STAGE | {"init": "more-1"},
    }
    recipe = recipe_of(stages, head='order = ["diffusion", "more", "last"]')
    assert list(recipe.stages) == ["diffusion", "more-1", "more-2", "last"]
    chosen = recipe_of(stages, "order=['diffusion', 'more-1', 'last']")
    assert list(chosen.stages) == ["diffusion", "more-1", "last"]


def test_a_file_that_extends_changes_the_stage_or_its_rounds(tmp_path: Path) -> None:
    base = "\n".join(f"{key} = {toml_value(value)}" for key, value in (STAGE | {"rounds": [{"steps": 2}, {}]}).items())
    (tmp_path / "base.toml").write_text(f'extends = "digits"\n[stages.more]\n{base}\n')

    def steps(text: str) -> list[tuple[str, int, int]]:
        (tmp_path / "child.toml").write_text(f'extends = "base.toml"\n[stages.more]\n{text}\n')
        stages = resolve(str(tmp_path / "child.toml")).stages
        return [(name, stage.steps, stage.batch) for name, stage in stages.items() if name.startswith("more")]

    assert steps("batch = 4") == [("more-1", 2, 4), ("more-2", 7, 4)]
    assert steps("rounds = [{}, { steps = 3 }, {}]") == [("more-1", 7, 8), ("more-2", 3, 8), ("more-3", 7, 8)]
    assert steps('rounds = "none"') == [("more", 7, 8)]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["more-2.steps=4"], [2, 4, 7]),
        (["more-*.steps=4"], [4, 4, 4]),
        (["more-*.steps=4", "more-2.steps=5"], [4, 5, 4]),
        (["*.steps=100"], [100, 100, 100]),
    ],
)
def test_an_override_takes_precedence_over_a_round(overrides: list[str], steps: list[int]) -> None:
    stages = recipe_of({"more": STAGE | {"rounds": [{"steps": 2}, {"steps": 3}, {}]}}, *overrides).stages
    assert [stages[f"more-{number}"].steps for number in (1, 2, 3)] == steps


@given(
    st.integers()
    | st.booleans()
    | st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=8).filter(lambda text: text != "none")
    | st.dictionaries(st.sampled_from(["steps", "batch"]), st.integers(1, 9))
    | st.just([])
    | st.lists(st.integers() | st.just({}), min_size=1, max_size=3).filter(lambda found: any(found) or 0 in found)
)
def test_what_is_no_list_of_tables(rounds: object) -> None:
    with pytest.raises(TcmError, match=r"more.rounds=.* must be a list with a table of its own keys for each round"):
        recipe_of({"more": STAGE | {"rounds": rounds}})


@pytest.mark.parametrize(
    ("stages", "overrides", "message"),
    [
        ({"more": STAGE | {"rounds": [{}, {"stepz": 3}]}}, (), "more-2.stepz is not a known key; did you mean 'steps'"),
        ({"more": STAGE | {"rounds": [{"steps": 0}, {}]}}, (), "more-1.steps=0 must be greater than 0"),
        ({"more": STAGE | {"rounds": [{"rounds": [{}]}]}}, (), "more-1.rounds is not a known key"),
        (
            {"more-1": STAGE, "more": STAGE | {"rounds": [{}]}},
            (),
            "there are two stages 'more-1', one of them a round; rename one",
        ),
        (
            {"more": STAGE | {"rounds": [{}, {}]}, "more-2": STAGE},
            (),
            "there are two stages 'more-2', one of them a round; rename one",
        ),
        (
            {"more": STAGE | {"rounds": [{}]}},
            ("more.steps=3",),
            "override 'more.steps': 'more' is neither a key nor a stage of this recipe; did you mean 'more-1.steps'?",
        ),
        (
            {"more": STAGE | {"rounds": [{}]}},
            ("mare-*.steps=3",),
            "override 'mare-*.steps=3': no stage is called 'mare-*'; the stages are diffusion, consistency, truncated, "
            "more-1",
        ),
        (
            {"more": STAGE | {"rounds": [{}]}},
            ("more-*.stepz=3",),
            "override 'more-*.stepz=3': no stage has the key 'stepz'; did you mean 'more-*.steps'?",
        ),
    ],
)
def test_what_is_wrong_is_named(stages: dict[str, Any], overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(TcmError) as caught:
        recipe_of(stages, *overrides)
    assert message in str(caught.value)


def test_commands_show_the_stages(tmp_path: Path) -> None:
    table = "\n".join(f"{key} = {toml_value(value)}" for key, value in (STAGE | {"rounds": [{"batch": 4}, {}]}).items())
    file = tmp_path / "mine.toml"
    file.write_text(f'extends = "digits"\n[stages.more]\n{table}\n')
    shown = CliRunner().invoke(app, ["recipes", "show", str(file), "more-2.steps=9"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert "[stages.more-1]" in shown.stdout
    assert "[stages.more-2]" in shown.stdout
    assert "rounds" not in shown.stdout
    (tmp_path / "shown.toml").write_text(shown.stdout)
    again = resolve(str(tmp_path / "shown.toml"))
    assert [(stage.batch, stage.steps) for stage in list(again.stages.values())[-2:]] == [(4, 7), (8, 9)]
    dry = CliRunner().invoke(
        app, ["train", str(file), "--run", str(tmp_path / "run"), "--dry-run"], catch_exceptions=False
    )
    assert dry.exit_code == 0, dry.output
    assert "more-1" in dry.output
    assert "more-2" in dry.output

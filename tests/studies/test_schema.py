"""A study's file: what it may say, what is wrong with it, and that it survives being written and read."""

from pathlib import Path

import pytest

from tcm.foundation.errors import TcmError
from tcm.recipes.resolve import differences, resolve
from tcm.studies.common_stages import shared_stages, stage_key
from tcm.studies.resolve import resolve_study, shipped_studies, study_to_toml, variants_of

HEAD = """
title = "T"
question = "Q?"
claim = "C."
where = "Table 1"
base = "digits"
"""
PHOTOGRAPHS = "-cifar10-16"
"""How the names of studies on photographs end."""
VARIANTS = '[variants]\none = []\ntwo = ["truncated.rho=0.5"]\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", shipped_studies())
def test_a_shipped_study_fits_its_recipe(name: str) -> None:
    """Each variant trains something of its own, or has a companion; the paper's table knows it by its own name."""
    study = resolve_study(name)
    variants = variants_of(study, 0)
    assert len(study.seeds) >= (3 if name.endswith(PHOTOGRAPHS) else 5)
    assert study.expects
    stages = shared_stages(study, variants)
    recipes = [(variant.recipe, variant.stage) for variant in variants]
    measured = [(stage_key(recipe, name), recipe.stages[name].companion_role) for recipe, name in recipes]
    assert len(set(measured)) == len(variants)
    for stage in stages.values():
        assert stage_key(stage.recipe, stage.name) == stage.key
    if study.paper is not None and not name.startswith("truncation"):
        assert study.paper.rows.keys() <= study.variants.keys()


def test_the_shipped_studies_are_those_of_the_paper_and_ours() -> None:
    rows = {name: len(resolve_study(name).variants) for name in shipped_studies()}
    assert rows == {
        "boundary": 9,
        "distance": 4,
        "from-data": 5,
        "ratio": 5,
        "stability": 3,
        "stages": 7,
        "t-prime": 7,
        f"t-prime{PHOTOGRAPHS}": 7,
        "tangents": 16,
        f"tangents{PHOTOGRAPHS}": 6,
        "times": 3,
        "trade-off": 3,
        f"trade-off{PHOTOGRAPHS}": 3,
        "truncation": 3,
        f"truncation{PHOTOGRAPHS}": 3,
    }


@pytest.mark.parametrize("name", shipped_studies())
def test_written_and_read_it_is_the_same(name: str, tmp_path: Path) -> None:
    study = resolve_study(name)
    assert resolve_study(written(tmp_path, study_to_toml(study))) == study


def test_variants_are_the_base_with_their_overrides(tmp_path: Path) -> None:
    """A variant's own override wins over that for all variants."""
    path = written(tmp_path, HEAD + 'overrides = ["truncated.rho=0.1", "*.keep=3"]\n' + VARIANTS)
    one, two = variants_of(resolve_study(path), 7)
    changed = ["seed: 0 → 7", "diffusion.keep: 2 → 3", "consistency.keep: 2 → 3", "truncated.keep: 2 → 3"]
    assert sorted(differences(resolve("digits"), one.recipe)) == sorted([*changed, "truncated.rho: 0.25 → 0.1"])
    assert differences(one.recipe, two.recipe) == ["truncated.rho: 0.1 → 0.5"]
    assert (one.stage, one.seed, resolve_study(path).compared_with) == ("truncated", 7, "one")


def test_a_baseline_is_not_what_is_measured(tmp_path: Path) -> None:
    (variant,) = variants_of(resolve_study(written(tmp_path, HEAD.replace("digits", "demo") + "[variants]\na = []")), 0)
    assert list(variant.recipe.stages)[-1] == "continued"
    assert variant.stage == "truncated"


def test_a_grid_is_all_combinations(tmp_path: Path) -> None:
    """Named by the last part of each key, or by the whole key where two end alike."""
    grid = '[grid]\n"consistency.batch" = [64]\n"truncated.batch" = [64, 128]\n"truncated.rho" = [0.25, 0.5]\n'
    study = resolve_study(written(tmp_path, HEAD + grid))
    assert list(study.variants)[:2] == [
        "consistency.batch = 64, truncated.batch = 64, rho = 0.25",
        "consistency.batch = 64, truncated.batch = 64, rho = 0.5",
    ]
    assert len(study.variants) == 4
    stage = variants_of(study, 0)[-1].recipe.stages["truncated"]
    assert (stage.batch, vars(stage)["rho"]) == (128, 0.5)


def test_the_base_is_looked_for_beside_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "base.toml").write_text('extends = "digits"\n')
    path = written(tmp_path / "inside", HEAD.replace("digits", "../base.toml") + VARIANTS)
    monkeypatch.chdir(tmp_path)
    assert resolve_study(path.relative_to(tmp_path)).base == str(tmp_path / "base.toml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[variants]\n", "variants={} must have at least 1 item"),
        (VARIANTS + "[mesure]\n", "mesure is not a known key; did you mean 'measure'?"),
        (VARIANTS + "[measure]\ncuont = 9", "measure.cuont is not a known key; did you mean 'count'?"),
        (VARIANTS + '[measure]\nmetrics = ["fdi"]', "measure.metrics[0]='fdi'"),
        ('reference = "three"\n' + VARIANTS, "reference='three' is not a variant; use one of: one; two"),
        ("seeds = [1, 1]\n" + VARIANTS, "seeds: 1 is given twice; give each seed once"),
        ("seeds = [-1]\n" + VARIANTS, "seeds[0]=-1"),
        (VARIANTS + '[grid]\n"truncated.rho" = [0.5]', "grid and variants cannot both be given; give one of them"),
        (VARIANTS + "[measure]\nmetrics = []", "nothing is measured; give metrics and steps, dfid, or gradients"),
        (VARIANTS + "[measure]\nsteps = [1, 1]", "steps: 1 is given twice; give it once"),
        ("seeds = [99999999999999999999]\n" + VARIANTS, "seeds[0]=99999999999999999999"),
        ('[variants]\none = "truncated.steps=8"', "must be a list of overrides; write ['truncated.steps=8']"),
        (f'[variants]\n"{"long" * 60}" = []', "is too long for a folder's name; choose a shorter one"),
        ('[grid]\n"truncated.rho" = [0.5, 0.5]', "grid.truncated.rho: 0.5 is given twice; give it once"),
        ('[grid]\n"truncated.rho" = [2026-11-18]', "no key of a recipe takes a date such as 2026-11-18; remove it"),
        ("[grid]\ntruncated.rho = [0.5]", 'write the key in quotes, such as "truncated.rho" = [0.1, 0.25]'),
        (
            '[variants]\n"a b" = []\n"a-b" = []',
            "'a b' and another variant would have the same folder, 'a-b'; rename one",
        ),
        ('[variants]\n"\'" = []', 'the name "\'" has neither letters nor digits; choose another'),
        (
            VARIANTS + '[expects]\nbetter = "one"\nthan = ["two"]\nby = "fid"',
            "expects.by='fid' is not measured; use one of: fid, 1 step; fid, 2 steps",
        ),
        (
            VARIANTS + '[expects]\nbetter = "one"\nthan = ["one"]\nby = "fid, 1 step"',
            "expects.than='one' is the variant that should be better; remove it",
        ),
        (
            VARIANTS + '[paper]\ncolumns = ["a", "b"]\nrows = { one = [1.0] }',
            "'one' has 1 cells, but there are 2 columns; write \"none\" for a cell that the paper leaves out",
        ),
    ],
)
def test_a_wrong_study_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TcmError) as error:
        resolve_study(written(tmp_path, HEAD + text))
    assert message in str(error.value)
    assert "mine.toml" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[variants]\none = ["truncated.roh=1"]', "mine, variant 'one': digits: truncated.roh is not a known key"),
        (
            '[variants]\none = { stage = "truncatd" }',
            "variants.'one'.stage='truncatd' is not a stage of digits; did you mean 'truncated'?",
        ),
        (
            VARIANTS + '[measure]\ncurve = ["continued"]',
            "measure.curve='continued' is not a stage; use one of: diffusion, consistency, truncated",
        ),
        (VARIANTS + "[measure]\ndfid = [100.0]", "measure.dfid=100 lies above t_max=80; use lower times"),
        ('[variants]\none = ["seed=3"]', "variant 'one': seed cannot be overridden; give the study's seeds"),
    ],
)
def test_variants_that_do_not_fit_the_recipe_are_refused(text: str, message: str, tmp_path: Path) -> None:
    study = resolve_study(written(tmp_path, HEAD + text))
    with pytest.raises(TcmError) as error:
        variants_of(study, 0)
    assert message in str(error.value)


def test_a_study_that_is_not_there() -> None:
    with pytest.raises(TcmError, match="study 't-prim' does not exist; did you mean 't-prime'"):
        resolve_study("t-prim")
    with pytest.raises(TcmError, match=r"study 'nowhere.toml' cannot be read \(No such file or directory\)"):
        resolve_study("nowhere.toml")


def test_a_study_may_extend_another(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text('extends = "digits"\n')
    text = HEAD.replace('"digits"', '"base.toml"')
    (tmp_path / "first.toml").write_text(f"{text}{VARIANTS}[measure]\nsteps = [1, 2]\ncount = 100\n")
    path = written(tmp_path, 'extends = "first.toml"\ntitle = "Other"\n[variants]\nthree = []\n[measure]\ncount = 50\n')
    study, first = resolve_study(path), resolve_study(tmp_path / "first.toml")
    assert (study.name, study.title, study.question, study.base) == ("mine", "Other", first.question, first.base)
    assert list(study.variants) == ["one", "two", "three"]
    assert (study.measure.count, study.measure.steps) == (50, (1, 2))


def test_the_examples_on_the_page_are_studies(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text("utf-8")
    whole, grid, extended = (block.split("```")[0] for block in page.split("```toml\n")[1:4])
    (tmp_path / "whole.toml").write_text(whole, "utf-8")
    assert len(variants_of(resolve_study(tmp_path / "whole.toml"), 0)) == 3
    without = whole[: whole.index("[variants]")].replace('reference = "450 steps"', "")
    (tmp_path / "grid.toml").write_text(without + grid, "utf-8")
    assert len(resolve_study(tmp_path / "grid.toml").variants) == 9
    (tmp_path / "extended.toml").write_text(extended, "utf-8")
    assert resolve_study(tmp_path / "extended.toml").base == "fashion-mnist"

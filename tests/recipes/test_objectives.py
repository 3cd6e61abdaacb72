"""A recipe that validates can be trained: every stage has its objective and draws times, so that none fails later."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tcm.method.objectives import TruncatedConsistency
from tcm.networks import DDPMppConfig
from tcm.recipes.schema import DataSpec, Recipe
from tcm.recipes.stages import PairsStage

NETWORK = DDPMppConfig(channels=8, channel_mult=(1,), blocks=1, attention=())

usual = st.sampled_from([0.0, 1e-8, 0.002, 0.2, 0.25, 0.5, 1.0, 2.0, 80.0])
number = usual | st.floats(-20, 20) | st.floats(allow_nan=False, allow_infinity=False)
positive = usual | st.floats(1e-3, 100) | st.floats(min_value=0, exclude_min=True, allow_infinity=False)
fraction = st.floats(0, 1)
bound = st.none() | st.none() | positive

ends = {"low": bound, "high": bound}
times = st.fixed_dictionaries(
    {"kind": st.just("lognormal"), "mean": number, "std": positive}, optional=ends
) | st.fixed_dictionaries(
    {"kind": st.just("logstudentt"), "mean": number, "std": positive, "nu": positive}, optional=ends
)
distance = st.just({"kind": "squared_l2"}) | st.fixed_dictionaries({"kind": st.just("pseudo_huber"), "c": positive})
average = st.fixed_dictionaries({"kind": st.just("constant"), "decay": fraction}) | st.fixed_dictionaries(
    {"kind": st.just("power"), "gamma": positive}
)
curriculum = st.fixed_dictionaries(
    {}, optional={"q": st.floats(1, 1e6), "d": st.integers(0, 10**6), "limit": fraction, "k": positive}
)
shared = {
    "steps": st.just(10),
    "batch": st.integers(1, 64),
    "learning_rate": st.just(1e-3),
    "averages": st.tuples(average),
}
pairs = {
    "times": times,
    "curriculum": curriculum,
    "distance": distance,
    "weighting": st.sampled_from(["inverse_delta", "inverse_c_out_squared", "uniform"]),
}
diffusion = st.fixed_dictionaries({"objective": st.just("diffusion")} | shared, optional={"times": times})
consistency = st.fixed_dictionaries(
    {"objective": st.just("consistency")} | shared,
    optional=pairs | {"t_high": bound},
)
truncated = st.fixed_dictionaries(
    {"objective": st.just("truncated")} | shared,
    optional=pairs | {"t_prime": positive, "w_b": positive, "rho": fraction},
)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe | None:
    """A recipe of one to three stages with any numbers in it, or None if it is refused."""
    stages = [("diffusion", diffusion), ("consistency", consistency), ("truncated", truncated)]
    first = draw(st.integers(0, 2))
    last = draw(st.integers(first, 2))
    tree = {
        "name": "any",
        "data": DataSpec(path="digits"),
        "network": NETWORK,
        "stages": {name: draw(stage) for name, stage in stages[first : last + 1]},
    }
    tree |= draw(st.fixed_dictionaries({}, optional={"t_min": positive, "t_max": positive, "sigma_data": positive}))
    try:
        return Recipe.model_validate(tree)
    except ValidationError:
        return None


@settings(deadline=None, max_examples=150)
@given(recipes())
def test_a_recipe_that_validates_has_objectives_and_draws_times(recipe: Recipe | None) -> None:
    if recipe is None:
        return
    for stage in recipe.stages.values():
        objective = stage.build(recipe)
        t = objective.times.quantile(torch.linspace(0, 1, 9))
        low, high = stage.span(recipe)
        assert bool(((t >= low) & (t <= high)).all())
        for step in (0, stage.steps - 1):
            assert all(0 <= decay.beta(step + 1) < 1 for decay in stage.averages)
            if isinstance(stage, PairsStage):
                delta = objective.pairs.curriculum.delta(t, step)
                assert bool(((delta > 0) & (delta < t)).all())
        if isinstance(objective, TruncatedConsistency):
            assert 0 < objective.boundary_count(stage.batch) < stage.batch

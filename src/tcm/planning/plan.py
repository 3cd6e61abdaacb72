"""A recipe for a data set, this machine and a budget of time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tcm.data import Dataset
from tcm.foundation.devices import free_memory
from tcm.foundation.errors import TcmError
from tcm.foundation.processes import Processes
from tcm.planning import rules
from tcm.planning.look import Look, check_enough, look_at
from tcm.planning.rules import Choice
from tcm.planning.timing import seconds_per_step
from tcm.recipes.estimates import estimate
from tcm.recipes.resolve import recipe_of, tree_to_toml
from tcm.recipes.schema import Recipe
from tcm.recipes.tables import Tree

OVERHEAD = 0.08
"""Of a budget: sample grids, checkpoints, starting."""
MEMORY = 0.7
"""Of the free memory: what a run may take."""
FEWEST_STEPS = 100

Steps = dict[str, int]


@dataclass(frozen=True)
class PlannedRecipe:
    """What was chosen and why, the recipe that follows, and the seconds that each stage will take."""

    choices: tuple[Choice, ...]
    recipe: Recipe
    seconds: dict[str, float]

    def toml(self) -> str:
        """The recipe as a file to edit; its reasons come first."""
        reasons = "".join(f"# {choice.what}: {choice.why}\n" for choice in self.choices)
        return reasons + "\n" + tree_to_toml(_tree(self.choices))


@dataclass(frozen=True)
class Planner:
    """Finds the plan for a data set and a budget in seconds."""

    dataset: Dataset
    path: str
    look: Look
    budget: float
    processes: Processes
    patience: float = 0.5
    """Seconds for which each stage is timed."""

    def plan(self, say: Callable[[str], None]) -> PlannedRecipe:
        """The widest network that the budget has time for, and as many steps as fit."""
        few = dict.fromkeys(rules.SHARES, FEWEST_STEPS)
        (width, *wider_ones), batch = rules.widths(self.look), rules.BATCHES[0]
        timed: dict[int, int] = {}
        for wider in wider_ones:
            say(f"timing a network with {wider} channels")
            draft = _recipe(self.choices(wider, batch, few))
            step = self._seconds(draft, "diffusion")
            images = timed[wider] = int(self._time("diffusion") / step * batch)
            width = wider if images >= rules.IMAGES_WANTED else width
            if images < 2 * rules.IMAGES_WANTED:  # twice the width takes at least twice the time
                break
        for batch in rules.BATCHES:
            say(f"timing each stage with batches of {batch}")
            draft = _recipe(self.choices(width, batch, few))
            step_of = {name: self._seconds(draft, name) for name in rules.SHARES}
            steps = {name: int(self._time(name) / step_of[name]) for name in rules.SHARES}
            if min(steps.values()) >= rules.STEPS_WANTED:
                break
        self._check(steps)
        choices = self.choices(width, batch, steps, timed)
        return PlannedRecipe(choices, _recipe(choices), {name: steps[name] * step_of[name] for name in steps})

    def choices(
        self, width: int, batch: int, steps: Steps, timed: Mapping[int, int] | None = None
    ) -> tuple[Choice, ...]:
        """All rules, given the network's width, the batch and the length of the stages.

        `timed` are the images that stage 0 would see with the widths that were tried.
        """
        found = (
            rules.stages(),
            rules.data(self.look, self.path),
            rules.conditions(self.look),
            rules.mirroring(self.look),
            rules.times(self.look),
            rules.network(self.look, width, steps["diffusion"] * batch, timed or {}),
            rules.learning_rates(width, batch),
            rules.lengths(steps, batch, self.look.summary.count),
            rules.precision(),
        )
        parts = _micro_batches(_recipe(found), free_memory(self.processes.device) * MEMORY)
        return found if parts == 1 else (*found, rules.micro_batches(parts, batch))

    def _seconds(self, draft: Recipe, name: str) -> float:
        return seconds_per_step(draft, name, self.dataset, self.processes, self.patience)

    def _time(self, name: str) -> float:
        return self.budget * (1 - OVERHEAD) * rules.SHARES[name]

    def _check(self, steps: Steps) -> None:
        fewest = min(steps.values())
        if fewest < FEWEST_STEPS:
            enough = self.budget * FEWEST_STEPS / max(1, fewest) / 60
            raise TcmError(
                f"--budget={self.budget / 60:.3g}m has time for {fewest} steps of a stage on this machine, and "
                f"{FEWEST_STEPS} are the least that is useful; give {enough + 1:.0f}m"
            )


def make_plan(
    dataset: Dataset, path: str, budget: float, processes: Processes, say: Callable[[str], None]
) -> PlannedRecipe:
    """Plan a run of `budget` seconds on this machine."""
    say("looking at the data")
    look = look_at(dataset)
    check_enough(look, path)
    return Planner(dataset, path, look, budget, processes).plan(say)


def _micro_batches(recipe: Recipe, memory: float) -> int:
    """Into how many parts a batch must be cut so that every stage fits into memory."""
    parts = 1
    for stage in recipe.stages.values():
        cost = estimate(recipe, stage)
        while parts < stage.batch and cost.memory.state + cost.memory.activations / parts > memory:
            parts *= 2
    return parts


def _tree(choices: tuple[Choice, ...]) -> Tree:
    """The choices' keys, `a.b.c`, as nested tables."""
    tree: Tree = {}
    for choice in choices:
        for key, value in choice.keys.items():
            table = tree
            *parents, last = key.split(".")
            for parent in parents:
                table = table.setdefault(parent, {})
            table[last] = value
    return tree


def _recipe(choices: tuple[Choice, ...]) -> Recipe:
    return recipe_of(_tree(choices) | {"name": "planned"}, "the plan")

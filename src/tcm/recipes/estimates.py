"""What a stage costs: parameters, FLOPs and memory, counted on the meta device; nothing is computed or allocated."""

from dataclasses import dataclass, fields
from math import ceil

from tcm.foundation.errors import TcmError
from tcm.foundation.files import byte_size
from tcm.method.conditions import ConditionKind
from tcm.networks import ImageShape
from tcm.networks.cost import NetworkCost, network_cost
from tcm.recipes.lineage import condition_of, network_of
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Role, Rows, Stage

GRADIENT_PASS, TANGENT_PASS = 3, 2
"""A forward and backward pass costs about three forward passes, one with a tangent about two."""

UTILISATION = 0.3
PEAK_FLOPS = {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
"""An A100's peak. Training U-Nets reaches about UTILISATION of it."""

ASSUMPTION = (
    f"an A100 at {UTILISATION:.0%} of its peak ({PEAK_FLOPS['fp32'] / 1e12:.1f} TFLOP/s in fp32, "
    f"{PEAK_FLOPS['tf32'] / 1e12:.0f} in tf32, {PEAK_FLOPS['fp16'] / 1e12:.0f} in 16 bit)"
)


Images = tuple[ImageShape, ConditionKind | None]
"""What a network is built for: the shape of the images, and what it is conditioned on."""


@dataclass(frozen=True)
class Memory:
    """Bytes in a process during a step, without data parallelism's or the allocator's own."""

    weights: int
    gradients: int
    optimizer: int
    averages: int
    helpers: int
    kept_once: int
    activations: int

    @property
    def state(self) -> int:
        """All but the activations: what does not depend on the batch; `kept_once` are EDM2's normalised weights."""
        return self.total - self.activations

    @property
    def total(self) -> int:
        """All bytes together."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class StageCost:
    """The cost of a stage; a multiplication and an addition are two FLOPs, `gpu_hours` are predicted for ASSUMPTION."""

    parameters: int
    forward_flops: int
    rows: Rows
    """Evaluations per image of all networks together; a teacher's and a frozen model's are plain ones."""
    step_flops: int
    activations_per_image: int
    memory: Memory
    gpu_hours: float


def estimate(recipe: Recipe, stage: Stage, processes: int = 1, images: Images | None = None) -> StageCost:
    """The cost of a stage whose batch is shared by `processes`; `images` are the recipe's unless they are given.

    A stage gives the rows of its student's network: evaluations per image with gradient, without, and with a tangent; a
    role gives those of its own. Activations are what autograd keeps for the backward pass: at most this much, as if the
    passes with gradient of a whole step were kept together.

    >>> from tcm.recipes.resolve import resolve
    >>> cifar10 = resolve("cifar10")
    >>> estimate(cifar10, cifar10.stages["truncated"]).parameters
    55732739
    """
    shape = images or _shape_and_condition(recipe)
    network = network_cost(network_of(recipe, stage), *shape)
    half = 2 if stage.precision in ("bf16", "fp16") else 1
    micro_batch = -(-stage.batch // (stage.accumulation * processes))
    costs = _role_costs(recipe, stage, shape)
    sizes = [(role, 4 * cost.parameters) for role, cost in costs]
    learning = [(role, 4 * cost.learning) for role, cost in costs if role.trained]
    moved = sum(size for _, size in learning)
    evaluated = [(stage.rows(), network), *((role.rows, cost) for role, cost in costs)]
    step_flops = int(sum(_passes(rows, cost) * cost.forward_flops for rows, cost in evaluated) * stage.batch)
    saved_per_image = sum(ceil(rows.gradient) * cost.saved_per_image for rows, cost in evaluated)
    memory = Memory(
        weights=sum(size for role, size in sizes if role.trained),
        gradients=moved,
        optimizer=2 * moved,
        averages=sum(len((role.optimization or stage).averages) * size for role, size in learning),
        helpers=sum(size // (2 if role.precision == "bf16" else 1) for role, size in sizes if not role.trained),
        kept_once=sum(cost.saved_once for rows, cost in evaluated if rows.gradient) // half,
        activations=saved_per_image // half * micro_batch,
    )
    seconds = stage.steps * step_flops / (PEAK_FLOPS[stage.precision] * UTILISATION)
    return StageCost(
        network.parameters,
        network.forward_flops,
        Rows(**{field.name: sum(getattr(rows, field.name) for rows, _ in evaluated) for field in fields(Rows)}),
        step_flops,
        saved_per_image // half,
        memory,
        gpu_hours=seconds / 3600,
    )


def less_memory(recipe: Recipe, name: str, processes: int, images: Images, sharded: bool) -> str:
    """What a stage that found no memory needs, and how it would need less."""
    stage = recipe.stages[name]
    memory, part = estimate(recipe, stage, processes, images).memory, stage.batch // (stage.accumulation * processes)
    smaller = next((part // divisor for divisor in range(2, part + 1) if part % divisor == 0), part)
    remedies = [
        *([f"{name}.accumulation={stage.batch // (smaller * processes)}"] if part > 1 else []),
        f"a {name}.batch below {stage.batch}",
        *([f"{name}.precision=bf16"] if stage.precision in ("fp32", "tf32") else []),
        *([] if sharded else [f"--shard with more than {processes} {'process' if processes == 1 else 'processes'}"]),
    ]
    return (
        f"{name} needs about {byte_size(memory.state)}, and {byte_size(memory.activations)} for the activations of "
        f"{part} images at a time; use {', '.join(remedies[:-1])} or {remedies[-1]}"
    )


def _role_costs(recipe: Recipe, stage: Stage, shape: Images) -> list[tuple[Role, NetworkCost]]:
    """The roles of a stage, the student first, and what their networks cost."""
    roles = {"student": Role(trained=True)} | stage.roles(recipe)
    # Of a model from elsewhere only the source knows the network: it is taken to be the student's.
    owners = [(role, role if role.follows is None else roles[role.follows[0]]) for role in roles.values()]
    return [(role, network_cost(network_of(recipe, stage, owner), *shape)) for role, owner in owners]


def _passes(rows: Rows, cost: NetworkCost) -> float:
    """Forward passes that cost as much as these rows; a network that recomputes its blocks needs one more."""
    return (GRADIENT_PASS + cost.recomputes) * rows.gradient + TANGENT_PASS * rows.tangent + rows.plain


def _shape_and_condition(recipe: Recipe) -> Images:
    if recipe.image_shape is None:
        raise TcmError(
            f"{recipe.name}: image_shape is not set, so costs cannot be computed without the data; "
            f"add it, such as image_shape = [3, 32, 32]"
        )
    condition = condition_of(recipe) if recipe.conditional else None
    if recipe.conditional and condition is None:
        raise TcmError(
            f"{recipe.name}: classes is not set, so costs cannot be computed without the data; "
            f"add it, such as classes = 10, or a condition"
        )
    return recipe.image_shape, condition

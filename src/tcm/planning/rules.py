"""The rules of a plan: what follows from the data, the machine and the budget, each with its reason.

A rule is a function that returns a `Choice`: keys of a recipe, and why they have these values. Where the paper has a
figure, it is used, in units of the data (the paper's sigma_data is 0.5); the others come from runs on small data.
`docs/planning.md` says how well they do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, log, log10, sqrt
from typing import Any

from tcm.data.mirroring import TOLD_APART
from tcm.method.conditions import ConditionKind
from tcm.networks import DDPMppConfig, NetworkConfig, networks
from tcm.planning.look import Look
from tcm.recipes.lineage import condition_keys
from tcm.recipes.stages.truncated import LARGEST

DDPMPP = "ddpmpp"
SHARES = {"diffusion": 0.45, "consistency": 0.3, "truncated": 0.25}
"""Of the budget: stages 1 and 2 can only be as good as their teacher."""
WIDTHS = (8, 16, 32, 64, 128)
BATCHES = (128, 64, 32)
STEPS_WANTED = 400
"""Steps that each stage should have at least; with fewer, a smaller batch is better."""
LARGEST_T = 80.0
SMALLEST_SIGMA = 0.05
IMAGES_WANTED = 150_000
"""Images that stage 0 should see at least; with fewer, a smaller network is better."""


@dataclass(frozen=True)
class Choice:
    """Keys of a recipe with their values, and why."""

    what: str
    why: str
    keys: dict[str, Any]


def stages() -> Choice:
    """A diffusion model, and two stages that distil it."""
    return Choice(
        "diffusion, then consistency and truncated distillation",
        "the diffusion model is where stages 1 and 2 begin, and their teacher",
        {
            "stages.diffusion.objective": "diffusion",
            "stages.diffusion.init": "scratch",
            "stages.diffusion.optimizer": "adam",
            "stages.consistency.objective": "consistency",
            "stages.consistency.teacher": "diffusion",
            "stages.truncated.objective": "truncated",
            "stages.truncated.teacher": "diffusion",
        },
    )


def data(look: Look, path: str) -> Choice:
    """Shape and sigma_data are the data's."""
    summary = look.summary
    why = "as the data has them" + (f"; {summary.duplicates:,} are duplicates" if summary.duplicates else "")
    if summary.sigma_data < SMALLEST_SIGMA:
        why += f"; sigma_data, {summary.sigma_data:.2g}, is raised to the least that is useful"
    return Choice(
        f"{summary.count:,} images of {'×'.join(map(str, summary.shape))}, sigma_data {sigma_data(look):g}",
        why,
        {"data.path": path, "image_shape": list(summary.shape), "sigma_data": sigma_data(look)},
    )


def conditions(look: Look) -> Choice:
    """The data's, if a network takes them."""
    kind = look.summary.condition
    if kind is None:
        return Choice("no conditions", "the images have no classes or other annotations", {"conditional": False})
    name = network_for(kind)
    if name is None:
        return Choice(
            "no conditions",
            f"the images come with {kind}, but no installed network takes them; install one with an entry point in "
            "tcm.networks, or set network, condition and conditional in the recipe",
            {"conditional": False},
        )
    return Choice(f"{kind} as conditions", "as the data has them", {"conditional": True} | condition_keys(kind))


def network_for(kind: ConditionKind | None) -> str | None:
    """The network that learns this kind of condition: a DDPM++, or an installed one that needs no keys, or none.

    >>> from tcm.method.conditions import Classes
    >>> network_for(None), network_for(Classes(10))
    ('ddpmpp', 'ddpmpp')
    """
    if DDPMppConfig.takes(kind):
        return DDPMPP
    return next((name for name, config in networks().items() if config.takes(kind) and _needs_no_keys(config)), None)


def other_network(look: Look) -> str | None:
    """The network for these images, if that is not a DDPM++, about which alone there are rules."""
    name = network_for(look.summary.condition)
    return None if name == DDPMPP else name


def _needs_no_keys(config: type[NetworkConfig]) -> bool:
    return not any(field.is_required() for key, field in config.model_fields.items() if key != "kind")


def mirroring(look: Look) -> Choice:
    """Mirror only what has no left and right."""
    if other_network(look) is not None:
        may_differ = f"{look.summary.condition} may say what is left and what is right"
        return Choice("no mirroring", may_differ, {"data.flip": False})
    test = look.mirror
    told_apart = (
        f"a linear classifier tells {test.group} from their mirror images in {test.accuracy:.0%} ± "
        f"{2 * test.error:.0%} of cases; images are mirrored unless it is surely {TOLD_APART:.0%}"
    )
    return Choice(f"{'' if test.safe else 'no '}mirroring", told_apart, {"data.flip": test.safe})


def times(look: Look) -> Choice:
    """T drowns the largest difference between two images; all other times scale with the data's deviation."""
    t_max = min(LARGEST_T, rounded(max(1.0, look.farthest)))
    t_prime = rounded(min(LARGEST * sigma_data(look), t_max / 5))
    shift = round(log(2 * sigma_data(look)), 2)
    bound = (
        " (T is at most the paper's 80)" if look.farthest > LARGEST_T else " (T is at least 1)" * (look.farthest < 1)
    )
    usual = f"{LARGEST:g} sigma_data: below the paper's 2, because a smaller t' was better in two steps on the digits"
    return Choice(
        f"T = {t_max:g}, t' = {t_prime:g}",
        f"the two images farthest apart differ by {look.farthest:.3g}{bound}; "
        f"t' is {usual if LARGEST * sigma_data(look) <= t_max / 5 else f'T/5, as {LARGEST:g} sigma_data is more'}",
        {
            "t_max": t_max,
            "second_time": t_prime,
            "stages.diffusion.times": {"kind": "lognormal", "mean": round(shift - 1.2, 2), "std": 1.2},
            "stages.consistency.times": {"kind": "lognormal", "mean": round(shift - 1.1, 2), "std": 2.0},
            "stages.truncated.times": {"kind": "logstudentt", "mean": round(log(t_prime), 2), "std": 0.2, "nu": 0.01},
            "stages.truncated.t_prime": t_prime,
        },
    )


def widths(look: Look) -> tuple[int, ...]:
    """Those that the network may have; one of which nothing is known learns as carefully as the widest."""
    return WIDTHS if other_network(look) is None else WIDTHS[-1:]


def network(look: Look, width: int, seen: int, timed: Mapping[int, int]) -> Choice:
    """A DDPM++: the first level has this width, the others twice as much; attention at 8 pixels unless it is narrow.

    `seen` are the images that stage 0 sees, `timed` those that it would see with the widths that were tried. Data with
    conditions that it does not take have another network, as it is.
    """
    name = other_network(look)
    if name is not None:
        return Choice(
            f"the network {name!r}",
            f"it takes {look.summary.condition}; its learning rates are those of {width} channels",
            {"network": {"kind": name}},
        )
    sides = resolutions(*look.summary.shape[1:])
    table = {
        "kind": DDPMPP,
        "channels": width,
        "channel_mult": [1, *[2] * (len(sides) - 1)],
        "blocks": 1 if width < 64 else 2,
        "attention": [side for side in sides if side <= 8][:1] if width >= 16 else [],
    }
    why = f"stage 0 has time for {seen:,} images"
    if seen < IMAGES_WANTED:
        why += f", fewer than the {IMAGES_WANTED:,} that are wanted"
    if wider := [other for other in timed if other > width]:
        why += f"; with {wider[0]} channels, for {timed[wider[0]]:,}"
    elif width != WIDTHS[-1]:
        why += f"; with {2 * width} channels, for half of that at most"
    return Choice(f"a DDPM++ with {width} channels", why, {"network": table})


def resolutions(height: int, width: int) -> list[int]:
    """The longer side at each level of a U-Net, halved to 8 (from 16 or less to 4), or until it is odd.

    >>> resolutions(8, 8), resolutions(16, 16), resolutions(28, 28), resolutions(32, 48), resolutions(25, 25)
    ([8, 4], [16, 8, 4], [28, 14, 7], [48, 24, 12], [25])
    """
    sides, smallest = [max(height, width)], 4 if min(height, width) <= 16 else 8
    while height % 2 == 0 and width % 2 == 0 and min(height, width) > smallest:
        height, width = height // 2, width // 2
        sides.append(max(height, width))
    return sides


def learning_rates(width: int, batch: int) -> Choice:
    """Wider networks and smaller batches take smaller steps."""
    rate = rounded(8e-3 * sqrt(8 / width * batch / 128), 1)
    rates = {"diffusion": rate, "consistency": rate / 2, "truncated": rate / 2}
    return Choice(
        f"learning rates {rate:g} (diffusion) and {rate / 2:g}",
        "8e-3 is best for 8 channels and batches of 128; it scales with √(batch/channels)",
        {f"stages.{name}.learning_rate": value for name, value in rates.items()},
    )


def lengths(steps: dict[str, int], batch: int, images: int) -> Choice:
    """As many steps as the budget has time for; what depends on their number follows them."""
    keys: dict[str, Any] = {}
    for name, count in steps.items():
        every = max(1, count // 5)
        keys |= {f"stages.{name}.steps": count, f"stages.{name}.batch": batch, f"stages.{name}.keep": 1}
        keys |= {f"stages.{name}.checkpoint_every": every, f"stages.{name}.sample_every": every}
        keys |= {f"stages.{name}.averages": [{"kind": "power", "gamma": 6.94}]}
    keys |= {
        "stages.diffusion.warmup": min(500, steps["diffusion"] // 20),
        "stages.consistency.curriculum": {
            "q": 2.0,
            "d": max(1, steps["consistency"] // 5),
            "limit": ratio_limit(steps),
        },
        "stages.truncated.curriculum": {"d": 0, "limit": ratio_limit(steps)},
    }
    described = ", ".join(f"{count:,}" for count in steps.values())
    epochs, fewest = steps["diffusion"] * batch / images, min(steps.values())
    batches = f"the largest batches of {', '.join(map(str, BATCHES))} that leave {STEPS_WANTED} steps"
    if fewest < STEPS_WANTED:
        batches = (
            f"the smallest batches, although they leave a stage only {fewest:,} of the {STEPS_WANTED} steps wanted"
        )
    return Choice(
        f"{described} steps of {batch} images",
        f"what the budget has time for ({epochs:.3g} epochs of stage 0), in {batches}; averages and ratio keep pace "
        "with the steps",
        keys,
    )


def precision() -> Choice:
    """IEEE fp32 throughout."""
    return Choice(
        "precision fp32",
        "rounding to 16 bits hides the small differences that stages 1 and 2 learn from",
        {f"stages.{name}.precision": "fp32" for name in SHARES},
    )


def micro_batches(accumulation: int, batch: int) -> Choice:
    """As many as memory asks for; the result does not depend on it."""
    return Choice(
        f"micro-batches of {batch // accumulation}",
        "what fits into this machine's memory",
        {f"stages.{name}.accumulation": accumulation for name in SHARES},
    )


def ratio_limit(steps: dict[str, int]) -> float:
    """r/t at the end of stage 1: a tight one needs long training, or the model does not get there."""
    return 0.9 if steps["consistency"] < 10_000 else 0.97 if steps["consistency"] < 50_000 else 0.999


def sigma_data(look: Look) -> float:
    """The standard deviation of all pixels, to two digits."""
    return max(SMALLEST_SIGMA, round(look.summary.sigma_data, 2))


def rounded(value: float, digits: int = 2) -> float:
    """To this many digits.

    >>> rounded(9.627), rounded(101.0), rounded(0.1234)
    (9.6, 100.0, 0.12)
    """
    return round(value, digits - 1 - floor(log10(abs(value))))

"""What others add: an objective with a second network that is trained in its own way, a sampler, a network with
torch's own dropout."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch
from inprocess import ALONE, DEFAULTS, train
from launching import lines, tiny_recipe
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor, nn
from vector_condition import VectorKind

from tcm.data import open_dataset
from tcm.data.loader import Batches
from tcm.evaluation.generation import sampling_batch
from tcm.foundation.errors import TcmError, TcmWarning
from tcm.foundation.progress import PrintedProgress
from tcm.foundation.randomness import SampleStreams
from tcm.foundation.signals import StopRequest
from tcm.method.averaging import ConstantDecay
from tcm.method.conditions import Classes, Condition, ConditionKind
from tcm.method.objectives import Batch, Consistency, Diffusion, Losses, Models, Objective
from tcm.method.preconditioning import Denoiser, Masks, Network
from tcm.method.sampling import HeunSampler, Sampler, SamplingStep, consistency_steps
from tcm.method.times import TimeDistribution
from tcm.networks import NETWORKS, DDPMppConfig, ImageShape, NetworkConfig, networks
from tcm.networks.cost import network_cost
from tcm.planning.rules import network_for
from tcm.recipes.estimates import estimate
from tcm.recipes.folders import stage_folders
from tcm.recipes.resolve import differences, resolve, to_toml
from tcm.recipes.schema import Recipe
from tcm.recipes.stages import Optimization, Role, Rows, Setting, Stage, Turn
from tcm.recipes.stages.consistency import ConsistencyStage
from tcm.report.curves import trade_off
from tcm.report.drawing import ObservedRun, observe_run
from tcm.report.live import live_page
from tcm.report.page import render
from tcm.report.records import read_run
from tcm.training.checkpoint import Checkpoints
from tcm.training.metrics import MetricsFile
from tcm.training.run import Run
from tcm.training.stage_loop import StageLoop
from tcm.training.stage_models import Sources, card_of, check_run, stage_models
from tcm.weights import Model, ModelCard, inspect
from tcm.weights.importing import import_checkpoint

OWN, CRITIC = "test_plugins:PlainConfig", DDPMppConfig(channels=8, channel_mult=(1,), blocks=1, attention=())


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards name this file's classes by a path from which it was not imported."""
    monkeypatch.setenv("TCM_TRUST", "test_plugins")


class PlainConfig(NetworkConfig):
    """Convolutions with torch's own dropout, and statistics of the batch."""

    kind: Literal["test_plugins:PlainConfig"] = "test_plugins:PlainConfig"
    channels: int = 8
    jump: bool = False

    published_types: ClassVar[tuple[str, ...]] = ("PlainNet",)
    published_mark: ClassVar[str | None] = r"first\.weight"

    def build(self, image_shape: ImageShape, condition: ConditionKind | None) -> "Plain":
        return Plain(self, image_shape)

    @classmethod
    def infer_published(cls, weights: Mapping[str, Tensor]) -> dict[str, object] | None:
        if "first.weight" not in weights:
            return None
        channels, colours, *_ = weights["first.weight"].shape
        return {"img_resolution": 8, "img_channels": colours, "channels": channels}

    @classmethod
    def check_published(cls, arguments: Mapping[str, object]) -> dict[str, object]:
        return {"channels": cls.model_validate({"channels": arguments["channels"]}).channels}

    @classmethod
    def from_published(cls, arguments: Mapping[str, object]) -> "PlainConfig":
        return cls.model_validate({"channels": arguments["channels"]})


class Plain(Network):
    """Knows nothing of masks."""

    def __init__(self, config: PlainConfig, image_shape: ImageShape) -> None:
        super().__init__()
        self.enter = nn.Conv2d(image_shape[0], config.channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(config.channels)
        self.drop = nn.Dropout(0.5)
        self.leave = nn.Conv2d(config.channels, image_shape[0], 3, padding=1)
        self.jump = nn.Linear(1, config.channels) if config.jump else None

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        h = self.norm(self.enter(x)) + c_noise[:, None, None, None]
        if self.jump is not None:
            h = h + self.jump(c_noise[:, None])[:, :, None, None]
        return self.leave(self.drop(torch.relu(h)))

    def published_names(self) -> dict[str, str]:
        return {name: name.replace("enter.", "first.") for name in self.state_dict()}


@dataclass(frozen=True)
class ThirdsSampler(Sampler):
    """T, T/share, T/share²."""

    kind: Literal["test_plugins:ThirdsSampler"] = "test_plugins:ThirdsSampler"
    share: float = 3.0

    model = "thirds"
    usual_steps = (3,)
    generates_at_once = True

    def run(
        self,
        f: Denoiser,
        streams: SampleStreams,
        condition: Condition | None = None,
        *,
        steps: int | None = None,
        times: Sequence[float] | None = None,
        first: Tensor | None = None,
    ) -> Iterator[SamplingStep]:
        return consistency_steps(f, [f.t_max / self.share**i for i in range(steps or 3)], streams, condition, first)

    def describe(self, f: Denoiser, steps: int | None, times: Sequence[float] | None) -> str:
        return f"{steps or 3} times, each a {self.share:g}th of the one before"

    def evaluations(self, steps: int) -> int:
        return steps

    def name(self, steps: int) -> str:
        return "thirds"


@dataclass(frozen=True)
class WithCritic(Objective):
    """Consistency for the student, denoising for a critic that nobody listens to."""

    times: TimeDistribution

    def loss(self, models: Models, batch: Batch, step: int, streams: SampleStreams, turn: str = "student") -> Losses:
        if turn == "critic":
            return Diffusion(self.times).loss({"student": models["critic"]}, batch, step, streams)
        return Consistency(self.times).loss(models, batch, step, streams)


class CriticStage(Stage):
    """A student, and a smaller critic with a learning rate of its own."""

    objective: Literal["test_plugins:CriticStage"] = "test_plugins:CriticStage"
    critic: Optimization = Optimization(
        learning_rate=1e-2, optimizer="adam", clip=1.0, averages=(ConstantDecay(0.5), ConstantDecay(0.9))
    )

    def turns(self) -> tuple[Turn, ...]:
        return (Turn("critic"), Turn(every=2))

    def build(self, setting: Setting) -> WithCritic:
        return WithCritic(Consistency().times.within(*self.span(setting)))

    def describe(self) -> str:
        return "with a critic"

    def sampler(self, second_time: float) -> ThirdsSampler:
        return ThirdsSampler(share=4.0)

    def roles(self, setting: Setting) -> dict[str, Role]:
        return {
            "critic": Role(trained=True, network=CRITIC, optimization=self.critic, rows=Rows(gradient=1)),
            "shadow": Role(follows=("critic", ConstantDecay(0.5))),
        }

    def rows(self) -> Rows:
        return Rows(gradient=0.5, plain=0.5)

    def card_fields(self, setting: Setting) -> dict[str, object]:
        return {"extra": {"critic_channels": CRITIC.channels}}


def recipe_with(kind: type[Stage] = CriticStage, network: NetworkConfig | None = None, **settings: object) -> Recipe:
    words = {"steps": 5, "batch": 8, "optimizer": "adam", "learning_rate": 1e-3, "init": "scratch"}
    words |= {"log_every": 2, "checkpoint_every": 2, "sample_every": 0}
    base = tiny_recipe(2)
    given = {key: getattr(base, key) for key in base.model_fields_set}
    given |= {"network": network or PlainConfig(), "stages": {"critics": kind(**(words | settings))}}
    return Recipe.model_validate(given)


def begin(folder: Path, recipe: Recipe, output: StringIO | None = None) -> StageLoop:
    stage, dataset = recipe.stages["critics"], open_dataset("digits")
    card = card_of(recipe, "critics", dataset.shape, Classes(10))
    models = stage_models(recipe, "critics", card, Sources({}, None))
    trainer = Run(recipe, folder, ALONE, Console(file=StringIO()), DEFAULTS)._trainer(recipe, "critics", models)
    folder.mkdir(exist_ok=True)
    return StageLoop(
        trainer,
        Batches(dataset, seed=recipe.seed, batch=stage.batch),
        card,
        True,
        folder,
        Checkpoints(folder / "state", stage.keep, ALONE),
        PrintedProgress(Console(file=output or StringIO(), width=500), "critics", stage.steps),
        MetricsFile(folder / "metrics.jsonl"),
        [],
        [1],
    )


def weights(loop: StageLoop) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in loop.trainer.tensors().items()}


def test_train_resume_and_sample(tmp_path: Path) -> None:
    """Stopped twice and resumed: the weights of all roles are those of the run that nothing disturbed."""
    train(recipe_with(), tmp_path / "straight")
    folder = stage_folders(recipe_with(), tmp_path / "straight")["critics"]
    assert folder.name == "1-critics"
    stop = StopRequest(patient=True)
    stop.by = "SIGTERM"
    for number in range(2):
        torch.manual_seed(number)  # what torch's own generator holds is of no consequence
        assert not begin(tmp_path / "stopped", recipe_with()).run(stop)
    resumed = begin(tmp_path / "stopped", recipe_with())
    assert resumed.run(StopRequest(patient=True))
    end = begin(tmp_path / "end", recipe_with())
    end.checkpoints.load(folder / "state" / "step-5", end.trainer.tensors())
    found, expected = weights(resumed), weights(end)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {"critic.network.embed_0.weight", "shadow.network.embed_0.weight"} <= expected.keys()

    model = Model.load(folder / "model")
    assert (asdict(model.sampler), model.card.extra) == (asdict(ThirdsSampler(share=4.0)), {"critic_channels": 8})
    table = json.loads((folder / "model" / "config.json").read_text())["sampler"]
    assert table == {"kind": "test_plugins:ThirdsSampler", "share": 4.0}
    steps = list(model.sampler.run(model.denoiser, SampleStreams(range(2)), Classes(10).draw([0, 1])))
    assert [step.t for step in steps] == [10.0, 2.5, 0.625]
    assert torch.equal(model.sample(2), steps[-1].x)
    assert torch.equal(model.sample(2), model.sample(2)), "torch's own dropout is off"
    assert differences(resolve(str(tmp_path / "straight" / "recipe.toml")), recipe_with()) == []


@dataclass(frozen=True)
class StubbornSampler(ThirdsSampler):
    """Takes three steps, and no other number of them."""

    kind: Literal["test_plugins:StubbornSampler"] = "test_plugins:StubbornSampler"

    def run(
        self,
        f: Denoiser,
        streams: SampleStreams,
        condition: Condition | None = None,
        *,
        steps: int | None = None,
        times: Sequence[float] | None = None,
        first: Tensor | None = None,
    ) -> Iterator[SamplingStep]:
        if steps not in (None, 3):
            raise TcmError(f"steps={steps}: this sampler takes 3")
        return super().run(f, streams, condition, steps=steps, times=times, first=first)


@dataclass(frozen=True)
class ClosedSampler(ThirdsSampler):
    """Takes no noise from outside, which the report's pictures between two noises need."""

    kind: Literal["test_plugins:ClosedSampler"] = "test_plugins:ClosedSampler"

    def run(
        self,
        f: Denoiser,
        streams: SampleStreams,
        condition: Condition | None = None,
        *,
        steps: int | None = None,
        times: Sequence[float] | None = None,
        first: Tensor | None = None,
    ) -> Iterator[SamplingStep]:
        if first is not None:
            raise TcmError("first: this sampler draws its noise itself")
        return super().run(f, streams, condition, steps=steps, times=times)


class StubbornStage(CriticStage):
    """Its model is sampled in three steps."""

    objective: Literal["test_plugins:StubbornStage"] = "test_plugins:StubbornStage"

    def sampler(self, second_time: float) -> StubbornSampler:
        return StubbornSampler()


def test_the_report_of_a_sampler_that_refuses_and_of_a_second_trained_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shows the sampler's own number of steps, each stage once, and the losses of both networks."""
    train(recipe_with(StubbornStage), tmp_path / "run")
    observed = observe_run(read_run(tmp_path / "run"))
    assert [(drawing.stage.name, drawing.problem) for drawing in observed.drawings] == [("critics", None)]
    assert observed.showpiece is not None
    assert [len(path.times) for path in observed.showpiece.paths] == [3]
    assert sampling_batch(Model.load(tmp_path / "run" / "1-critics" / "model")) > 1

    (stage,) = observed.record.stages
    assert stage.losses == {"student": "loss", "critic": "critic.loss"}
    for page in (render([observed]), live_page(tmp_path / "run", every=5)):
        assert "critics: critic" in page
        assert "critics: student" in page
        assert "Loss over steps of the models of critics" in page

    config = tmp_path / "run" / "1-critics" / "model" / "config.json"
    config.write_text(config.read_text().replace("StubbornSampler", "ClosedSampler"))
    refused = observe_run(read_run(tmp_path / "run"))
    assert [(drawing.stage.name, len(drawing.drawn)) for drawing in refused.drawings] == [("critics", 1)]
    assert "The model of critics in run gives no more images: first: this sampler draws" in render([refused])


def test_each_role_is_trained_in_its_own_way(tmp_path: Path) -> None:
    """Adam's first update moves a weight by its learning rate; the critic is the smaller network that it asked for."""
    loop = begin(tmp_path / "run", recipe_with())
    before = weights(loop)
    loop.trainer.step(0, loop.batches.at(0))
    after = weights(loop)
    largest = {
        role: max(float((after[name] - before[name]).abs().max()) for name in before if name.startswith(f"{role}."))
        for role in ("student.network", "critic.network", "shadow.network")
    }
    assert largest == pytest.approx({"student.network": 1e-3, "critic.network": 1e-2, "shadow.network": 5e-3}, rel=0.01)
    assert [len(loop.trainer.learners[role].averages) for role in ("student", "critic")] == [1, 2]
    sizes = {role: sum(p.numel() for p in model.parameters()) for role, model in loop.trainer.models.items()}
    assert sizes["critic"] == sizes["shadow"] != sizes["student"]
    recipe = recipe_with().model_copy(update={"image_shape": (1, 8, 8), "classes": 10})
    cost = estimate(recipe, recipe.stages["critics"])
    student, critic = 4 * sizes["student"], 4 * sizes["critic"]
    assert (cost.memory.weights, cost.memory.averages) == (student + critic, student + 2 * critic)
    assert cost.memory.helpers == critic
    shape = ((1, 8, 8), Classes(10))
    one, other = network_cost(PlainConfig(), *shape), network_cost(CRITIC, *shape)
    assert cost.step_flops == int((3 * 0.5 + 0.5) * one.forward_flops + 3 * other.forward_flops) * 8
    assert cost.memory.activations == 8 * (one.saved_per_image + other.saved_per_image)


class UpperStage(CriticStage):
    """Trained only on high noise levels."""

    objective: Literal["test_plugins:UpperStage"] = "test_plugins:UpperStage"

    def span(self, setting: Setting) -> tuple[float, float]:
        return 1.0, setting.t_max


class ForgetfulStage(UpperStage):
    """Another model is used at low noise levels."""

    objective: Literal["test_plugins:ForgetfulStage"] = "test_plugins:ForgetfulStage"

    def forgets_below(self, setting: Setting) -> float:
        return 2.0


@pytest.mark.parametrize(("kind", "t_prime"), [(UpperStage, None), (ForgetfulStage, 2.0)])
def test_the_stage_says_whether_its_model_may_forget(
    kind: type[UpperStage], t_prime: float | None, tmp_path: Path
) -> None:
    """Whatever the times that it is trained on."""
    (tmp_path / "recipe.toml").write_text(to_toml(recipe_with(kind)))
    record = read_run(tmp_path)
    assert [(stage.span[0], stage.forgets_below) for stage in record.stages] == [(1.0, t_prime)]
    text = trade_off([ObservedRun(record, [], None)])
    assert ("may forget how to denoise" in text, "t′" in text) == (t_prime is not None, t_prime is not None)


class TwiceStage(CriticStage):
    """Two passes with gradient in a step."""

    def rows(self) -> Rows:
        return Rows(gradient=2)


def test_all_passes_with_gradient_keep_their_activations() -> None:
    recipes = [
        recipe_with(kind).model_copy(update={"image_shape": (1, 8, 8), "classes": 10})
        for kind in (CriticStage, TwiceStage)
    ]
    one, two = (estimate(recipe, recipe.stages["critics"]) for recipe in recipes)
    kept = network_cost(PlainConfig(), (1, 8, 8), Classes(10)).saved_per_image
    assert two.activations_per_image - one.activations_per_image == kept
    assert two.memory.activations - one.memory.activations == 8 * kept


def test_the_progress_line_shows_what_the_objective_reports(tmp_path: Path) -> None:
    output = StringIO()
    loop = begin(tmp_path / "run", recipe_with(), output)
    loop.run(StopRequest(patient=True))
    line = output.getvalue().splitlines()[0]
    for name in ("critic.loss", "critic.denoising", "critic.gradient_norm", "consistency", "images/s"):
        assert name in line
    rates = {key: value for key, value in lines(tmp_path / "run")[0].items() if key.endswith("learning_rate")}
    assert rates == {"learning_rate": 1e-3, "critic.learning_rate": 1e-2}


def test_networks_run_in_eval_mode(tmp_path: Path) -> None:
    loop = begin(tmp_path / "run", recipe_with())
    assert not any(module.training for model in loop.trainer.models.values() for module in model.modules())
    x, t = torch.randn(4, 1, 8, 8), torch.ones(4)
    student = loop.trainer.student
    assert torch.equal(student(x, t)[:2], student(x[:2], t[:2])), "no sample depends on the others of its batch"


def test_dropout_needs_a_network_that_takes_masks() -> None:
    message = (
        "critics: dropout=0.2 needs a network that takes dropout masks, but network.kind='test_plugins:PlainConfig' "
        "does not; set dropout=0.0"
    )
    for settings in ({"dropout": 0.2}, {"network": PlainConfig(dropout=0.2)}):
        with pytest.raises(ValueError, match=message):
            recipe_with(**settings)


class SeldomStage(CriticStage):
    """In every second step nobody has a turn."""

    def turns(self) -> tuple[Turn, ...]:
        return (Turn("critic", every=2), Turn(every=4))


class StrangerStage(CriticStage):
    """A turn for a role that is not trained."""

    def turns(self) -> tuple[Turn, ...]:
        return (Turn("shadow"), Turn())


class LostStage(CriticStage):
    """An average of nothing."""

    def roles(self, setting: Setting) -> dict[str, Role]:
        return super().roles(setting) | {"shadow": Role(follows=("actor", ConstantDecay()))}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (SeldomStage, r"critics: turns=\[2, 4\] leave step 1 without a turn; give one of them every=1"),
        (StrangerStage, "critics: turns name 'shadow', which is not a trained role"),
        (LostStage, "critics: shadow follows 'actor', which does not have its own weights"),
    ],
)
def test_turns_and_roles_that_cannot_be(kind: type[Stage], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe_with(kind)


def test_a_roles_own_schedule_is_checked() -> None:
    with pytest.raises(ValueError, match=r"critics: critic.warmup=9 must be less than steps=5"):
        recipe_with(critic=Optimization(learning_rate=1.0, warmup=9))


class DenoiserStage(CriticStage):
    """A critic that is a diffusion model of its own."""

    objective: Literal["test_plugins:DenoiserStage"] = "test_plugins:DenoiserStage"
    learns_null: bool = False
    highest: float | None = None

    def span(self, setting: Setting) -> tuple[float, float]:
        return setting.t_min, self.highest or setting.t_max

    def roles(self, setting: Setting) -> dict[str, Role]:
        own = Role(trained=True, network=CRITIC, kind="diffusion", sampler=HeunSampler(), learns_null=self.learns_null)
        return {"critic": own}


def distilling(kind: type[Stage], guidance: float = 1.0, **settings: object) -> Recipe:
    """A stage that distils from the critic of the stage before."""
    base = recipe_with(kind, **settings)
    more = base.stages["critics"].model_dump(include={"steps", "batch", "learning_rate", "sample_every"})
    distilled = ConsistencyStage(**more, teacher="critics.critic", guidance=guidance, init="scratch")
    given = {key: getattr(base, key) for key in base.model_fields_set}
    return Recipe.model_validate(given | {"stages": base.stages | {"distilled": distilled}})


def test_a_role_trained_from_scratch_serves_as_a_teacher(tmp_path: Path) -> None:
    train(distilling(DenoiserStage), tmp_path / "run")
    critic = Model.load(tmp_path / "run" / "1-critics" / "roles" / "critic")
    assert (critic.card.kind, critic.sampler, critic.card.network) == ("diffusion", HeunSampler(), CRITIC)
    student = Model.load(tmp_path / "run" / "1-critics" / "model")
    assert (student.card.kind, student.sampler.kind) == ("test_plugins:DenoiserStage", "test_plugins:ThirdsSampler")
    assert (tmp_path / "run" / "2-distilled" / "model").is_dir()
    assert distilling(DenoiserStage, guidance=2.0, learns_null=True).stages["distilled"].rows().plain == 5


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (
            CriticStage,
            {},
            r"distilled.teacher='critics.critic' is the critic of the stage 'critics', which cannot provide the "
            r"teacher model; put a stage that makes one before 'distilled', or use one of: init",
        ),
        (
            DenoiserStage,
            {"guidance": 2.0},
            r"distilled.guidance needs a teacher that was also trained without conditions; name another model or "
            r"distilled.guidance=1.0",
        ),
        (
            DenoiserStage,
            {"highest": 8.0},
            r"distilled.teacher='critics.critic' must cover times up to 10, but the critic of the stage 'critics' is "
            r"defined only from 0.002 to 8",
        ),
    ],
)
def test_a_role_that_cannot_serve_is_refused_by_the_recipe(
    kind: type[Stage], words: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        distilling(kind, **words)


class CoarseStage(CriticStage):
    """A critic that halves images of 8 × 8 four times."""

    def roles(self, setting: Setting) -> dict[str, Role]:
        return {"critic": Role(trained=True, network=CRITIC.model_copy(update={"channel_mult": (1,) * 5}))}


def test_a_roles_own_network_is_checked_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(TcmError, match="image height=8 is not a multiple of 16"):
        train(recipe_with(CoarseStage), tmp_path / "run")
    assert not (tmp_path / "run" / "1-critics").exists()


class JumpStage(CriticStage):
    """The student has one more layer than the model that it starts from; the critic is all that its source is."""

    reinitialize: str = "network.jump"
    source: str = "init"

    def roles(self, setting: Setting) -> dict[str, Role]:
        return {
            "student": Role("init", self.init, trained=True, reinitialize=(self.reinitialize,)),
            "critic": Role("source", self.source, trained=True, network="source", source_sampler=HeunSampler),
        }


def test_weights_to_reinitialize_are_named_by_the_role(tmp_path: Path) -> None:
    dataset = open_dataset("digits")
    given = ModelCard(
        kind="diffusion", network=PlainConfig(), image_shape=dataset.shape, condition=Classes(10), sigma_data=0.75
    )
    source = Model.fresh(given)
    source.save(tmp_path / "source")
    words = {"network": PlainConfig(jump=True), "init": "init"}

    recipe = recipe_with(JumpStage, **words)
    card = card_of(recipe, "critics", dataset.shape, Classes(10))
    models = stage_models(recipe, "critics", card, Sources({}, str(tmp_path / "source")))
    expected = source.denoiser.state_dict()
    student, critic = (models[role].denoiser.state_dict() for role in ("student", "critic"))
    assert student.keys() - expected.keys() == {"network.jump.weight", "network.jump.bias"}
    assert all(torch.equal(student[name], expected[name]) for name in expected)
    assert critic.keys() == expected.keys()
    assert all(torch.equal(critic[name], expected[name]) for name in expected)

    recipe = recipe_with(JumpStage, **words, reinitialize="network.enter")
    with pytest.raises(TcmError, match=r"critics.init=init lacks network.jump.weight, network.jump.bias"):
        check_run(recipe, {"critics": card}, {}, str(tmp_path / "source"))


def install(folder: Path, package: str, *networks: str) -> None:
    """A package with networks, as pip leaves it: a .dist-info folder beside its modules."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("\n".join(["[tcm.networks]", *networks]))


def test_import_asks_the_networks_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = PlainConfig(channels=4).build((1, 8, 8), None)
    weights = {f"net.{network.published_names()[name]}": tensor for name, tensor in network.state_dict().items()}
    path = tmp_path / "plain.safetensors"
    save_file(weights, path)
    with pytest.raises(TcmError, match="holds no network"):
        import_checkpoint(path, "consistency")
    install(tmp_path, "plain", f"plain = {OWN}")
    monkeypatch.syspath_prepend(tmp_path)
    model = import_checkpoint(path, "consistency").model
    model.save(tmp_path / "model")
    monkeypatch.delenv("TCM_TRUST")
    monkeypatch.delitem(sys.modules, "test_plugins")
    assert inspect(tmp_path / "model").network.kind == OWN, "who installs a package trusts it"
    assert model.card.network.model_dump() == PlainConfig(channels=4).model_dump()
    found, expected = model.denoiser.network.state_dict(), network.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("value", "content", "problem"),
    [
        ("faulty:Net", "raise RuntimeError('boom')", "RuntimeError: boom"),
        ("faulty:Net", "import no_such_dependency", "No module named 'no_such_dependency'"),
        ("faulty:Net", "def", "SyntaxError"),
        ("faulty:Net", "raise SystemExit(3)", "SystemExit: 3"),
        ("faulty:Net", "1 / 0", "ZeroDivisionError"),
        ("faulty:Net", "", "has no attribute 'Net'"),
        ("faulty:Net", "Net = 1", "is not a subclass of NetworkConfig"),
        ("faulty:Net", "class Net: ...", "is not a subclass of NetworkConfig"),
        ("faulty", "", "is not of the form module:Class"),
        ("faulty:", "", "is not of the form module:Class"),
        ("not a module:Net", "", "is not of the form module:Class"),
        ("absent:Net", "", "No module named 'absent'"),
    ],
)
def test_a_broken_network_costs_only_a_warning(
    value: str, content: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for it gets an error."""
    (tmp_path / "faulty.py").write_text(content)
    install(tmp_path, "faulty", f"bad = {value}")
    install(tmp_path, "plain", f"plain = {OWN}")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(TcmWarning) as warned:
        found = networks()
    assert found.keys() == {*NETWORKS, "plain"}
    (text,) = (str(warning.message) for warning in warned)
    assert text.startswith("a plug-in of faulty is left out: kind='bad'")
    assert problem in text
    with pytest.warns(TcmWarning, match="faulty"):
        assert network_for(VectorKind(2)) is None, "a plan asks all networks too"
    with pytest.raises(TcmError) as caught:
        resolve("digits", ["network.kind=bad"])
    assert str(caught.value).startswith("digits: network.kind='bad'")
    assert problem in str(caught.value)
    sys.modules.pop("faulty", None)

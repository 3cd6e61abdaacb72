"""Conditions: rows, the null condition, devices; guidance and label dropout take any of them as it is."""

from collections.abc import Callable

import pytest
import torch
from elsewhere import ELSEWHERE, Elsewhere, OtherDevice
from oracles import Exact, NoNetwork, gaussian_denoiser
from torch import Tensor, nn

from tcm import Batch, Classes, ClassMix, Condition, Denoiser, Diffusion, Labels, SampleStreams, TextEmbeddings
from tcm.foundation.errors import TcmError
from tcm.method.objectives import Consistency, Distillation, Pairs, TruncatedConsistency
from tcm.method.preconditioning import Masks
from tcm.method.sampling import consistency_steps, heun_steps, last
from tcm.method.solvers import guided
from tcm.method.times import LogStudentT
from tcm.networks import NETWORKS

SHAPE = (1, 2, 2)
TOKENS, WIDTH = 3, 2


def labels(count: int) -> Labels:
    return Labels(torch.arange(count))


def mixes(count: int) -> ClassMix:
    """Image i is 1/(i + 1) of class 0, the rest of class 1."""
    share = 1 / torch.arange(1.0, count + 1)
    return ClassMix(torch.stack([share, 1 - share], dim=1))


def texts(count: int) -> TextEmbeddings:
    """Text i is i + 1 everywhere, its first i mod 3 + 1 tokens count; the null text is 0, of one token."""
    tokens = torch.arange(1.0, count + 1)[:, None, None].expand(count, TOKENS, WIDTH)
    mask = torch.arange(TOKENS)[None] <= torch.arange(count)[:, None] % TOKENS
    return TextEmbeddings(tokens, mask, torch.zeros(TOKENS, WIDTH), torch.tensor([True, False, False]))


def rows(condition: Condition) -> list[object]:
    """The condition of each image, as plain values."""
    if isinstance(condition, Labels):
        return condition.index.tolist()
    if isinstance(condition, ClassMix):
        return condition.weights.tolist()
    assert isinstance(condition, TextEmbeddings)
    return list(zip(condition.tokens.tolist(), condition.mask.tolist(), strict=True))


def null_row(condition: Condition) -> object:
    if isinstance(condition, Labels):
        return -1
    if isinstance(condition, ClassMix):
        return [0.0, 0.0]
    assert isinstance(condition, TextEmbeddings)
    return condition.null_tokens.tolist(), condition.null_mask.tolist()


kinds = pytest.mark.parametrize("make", [labels, mixes, texts])


@kinds
def test_selecting_takes_the_rows_of_these_images(make: Callable[[int], Condition]) -> None:
    whole = make(7)
    assert len(whole) == 7
    index = torch.tensor([5, 0, 5])
    assert rows(whole.select(index)) == [rows(whole)[i] for i in index]
    assert rows(whole.select(slice(1, None, 3))) == rows(whole)[1::3]
    none = whole.select(torch.empty(0, dtype=torch.long))
    assert (len(none), rows(none)) == (0, [])


@kinds
def test_what_is_not_kept_is_the_null_condition(make: Callable[[int], Condition]) -> None:
    whole = make(4)
    kept = whole.keep(torch.tensor([True, False, False, True]))
    null = null_row(whole)
    assert rows(kept) == [rows(whole)[0], null, null, rows(whole)[3]]
    assert rows(whole.null()) == [null] * 4
    assert null not in rows(whole)
    assert rows(kept.select(slice(1, 3)).null()) == [null] * 2, "rows know their null too"


@kinds
def test_on_another_device(make: Callable[[int], Condition]) -> None:
    """`kept` may come from the CPU, where random numbers are drawn; rows to select come with the images."""
    whole = make(4)
    expected = rows(whole.select(torch.tensor([2, 0])).keep(torch.tensor([False, True])))
    with OtherDevice():
        moved = whole.to(ELSEWHERE)
        parts = [part for part in vars(moved).values() if isinstance(part, Tensor)]
        assert parts
        assert all(isinstance(part, Elsewhere) for part in parts)
        found = moved.select(torch.tensor([2, 0]).to(ELSEWHERE)).keep(torch.tensor([False, True]))
        assert rows(found) == expected
        assert rows(found.null()) == [null_row(whole)] * 2
        assert rows(found.to(torch.device("cpu"))) == expected
        assert not any(isinstance(part, Elsewhere) for part in vars(found.to(torch.device("cpu"))).values())


def test_classes_that_a_user_chooses() -> None:
    kind = Classes(3)
    assert kind.choose(2, 4).index.tolist() == [2, 2, 2, 2]
    assert kind.choose([2, 0], 2).index.tolist() == [2, 0]
    assert kind.choose([], 0).index.tolist() == []
    with pytest.raises(TcmError, match="labels has 2 entries for 3 images"):
        kind.choose([2, 0], 3)
    with pytest.raises(TcmError, match="labels=3 must lie between 0 and 2"):
        kind.choose(3, 1)
    with pytest.raises(TcmError, match="count=0"):
        Classes(0)


def test_classes_by_name() -> None:
    kind = Classes(4, ("cat", "dog", "2", "dog"))
    assert kind.choose("cat", 2).index.tolist() == [0, 0]
    assert kind.choose(["cat", "3", 1, "2"], 4).index.tolist() == [0, 3, 1, 2]
    assert Classes(3, ("2", "1", "0")).choose(["2", 2], 2).index.tolist() == [0, 2], "a name comes before a number"
    for choice, message in (
        ("dog", "labels='dog': several classes have this name; give a number between 0 and 3"),
        ("cow", "labels='cow': none of the 4 classes has this name; give cat, dog, 2, or a number between 0 and 3"),
        ("dogs", "give dog, cat, 2, or a number"),
        ("-1", "labels='-1': none of the 4 classes has this name"),
        ("4", "labels=4 must lie between 0 and 3"),
    ):
        with pytest.raises(TcmError, match=message):
            kind.choose(choice, 1)
    with pytest.raises(TcmError, match=r"give bees, 0, 1, .*, 18, …, or a number between 0 and 999"):
        Classes(1000, (*map(str, range(999)), "bees")).choose("bee", 1)
    with pytest.raises(TcmError, match="none of the 2 classes has this name; give a number between 0 and 1"):
        Classes(2).choose("cat", 1)
    with pytest.raises(TcmError, match="names has 1 entries for count=2 classes"):
        Classes(2, ("cat",))


def test_how_classes_are_shown() -> None:
    given = Labels(torch.tensor([1, -1, 0]))
    assert Classes(2).captions(given) == ["class 1", "", "class 0"]
    assert Classes(2, ("cat", "dog")).captions(given) == ["dog", "", "cat"]
    mix = ClassMix(torch.tensor([[0.75, 0.25], [0.0, 1.0], [0.0, 0.0]]))
    assert Classes(2, ("cat", "dog")).captions(mix) == ["75% cat, 25% dog", "100% dog", ""]
    assert Classes(3).examples(2).index.tolist() == [0, 1]
    assert Classes(3).examples(10).index.tolist() == [0, 1, 2]


def test_what_a_class_conditional_model_takes() -> None:
    assert Classes(3).takes(Labels(torch.tensor([0, 2, -1])))
    assert not Classes(3).takes(Labels(torch.tensor([0, 3])))
    assert not Classes(3).takes(Labels(torch.tensor([0, -5])))
    assert not Classes(3).takes(texts(2))
    assert Classes(2).takes(mixes(2))
    assert not Classes(3).takes(mixes(2))


def test_a_class_is_drawn_from_its_images_seed() -> None:
    drawn = Classes(5).draw(range(1000)).index
    assert drawn.bincount(minlength=5).min() > 150
    assert torch.equal(Classes(5).draw([7, 3]).index, drawn[[7, 3]])


class Reader(NoNetwork):
    """The smallest network that reads texts: F is the mean of the tokens that count; it notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.read: list[Tensor] = []

    def forward(self, x: Tensor, c_noise: Tensor, condition: Condition | None, masks: Masks | None) -> Tensor:
        assert isinstance(condition, TextEmbeddings)
        counts = condition.mask[..., None].to(x)
        text = (condition.tokens * counts).sum((1, 2)) / (counts.sum((1, 2)) * WIDTH)
        self.read.append(text)
        return self.gain * text[:, None, None, None].expand_as(x)


def reader() -> Denoiser:
    return Denoiser(Reader(), SHAPE)


def test_guidance_leads_away_from_the_null_text() -> None:
    D, x, t = reader(), torch.randn(3, *SHAPE), torch.tensor([0.1, 1.0, 40.0])
    with torch.no_grad():
        towards, away = D(x, t, texts(3)), D(x, t, texts(3).null())
        found = guided(D, texts(3), 2.5)(x, t)
    assert not torch.allclose(towards, away)
    torch.testing.assert_close(found, away + 2.5 * (towards - away))


def test_label_dropout_gives_the_stated_share_of_images_the_null_text() -> None:
    f, batch = reader(), Batch.whole(torch.zeros(2000, *SHAPE), texts(2000))
    Diffusion(label_dropout=0.3).loss({"student": f}, batch, 0, SampleStreams(range(2000))).total.backward()
    (read,) = f.network.read
    null = read == 0
    assert float(null.float().mean()) == pytest.approx(0.3, abs=0.04)
    assert torch.equal(read[~null], torch.arange(1.0, 2001)[~null])
    assert float(f.network.gain.grad.abs()) > 0


def test_which_texts_are_dropped_does_not_depend_on_the_kind_of_condition() -> None:
    """One stream per sample decides, so labels and texts of the same seeds fall away together."""
    models = {"student": Exact(gaussian_denoiser(0.5), SHAPE)}
    dropped = [
        [
            row == null_row(condition)
            for row in rows(
                Diffusion(label_dropout=0.5)
                .draw(models, Batch.whole(torch.zeros(64, *SHAPE), condition), 0, SampleStreams(range(64)))
                .condition
            )
        ]
        for condition in (labels(64), texts(64))
    ]
    assert dropped[0] == dropped[1]
    assert 0 < sum(dropped[0]) < 64


@pytest.mark.parametrize(
    "objective",
    [
        Consistency(pairs=Pairs(distillation=Distillation(guidance=2.0))),
        TruncatedConsistency(LogStudentT(0.0, 0.2, low=1.0)),
    ],
    ids=lambda objective: type(objective).__name__,
)
def test_pairs_keep_each_images_text(objective: Consistency | TruncatedConsistency) -> None:
    """Student, target, frozen model and teacher: each sees the texts of its own rows."""
    models = {name: reader() for name in ("student", "frozen", "teacher")}
    batch = Batch.whole(torch.zeros(16, *SHAPE), texts(16))
    objective.loss(models, batch, 0, SampleStreams(range(16))).total.backward()
    student, frozen, teacher = ([read.tolist() for read in models[name].network.read] for name in models)
    everyone = [float(i) for i in range(1, 17)]
    target, output = student
    assert output == everyone
    if isinstance(objective, Consistency):
        assert (target, frozen) == (everyone, [])
        assert teacher == [everyone, [0.0] * 16] * 2, "Heun: two evaluations, each with text and without"
    else:
        assert sorted(target + frozen[0]) == everyone
        assert frozen[0][:4] == everyone[:4], "the boundary samples"


def test_sampling_by_texts() -> None:
    f = reader()
    apart = [
        last(heun_steps(f, 3, SampleStreams([seed]), texts(4).select(slice(seed, seed + 1)), 2.0)) for seed in range(4)
    ]
    torch.testing.assert_close(last(heun_steps(f, 3, SampleStreams(range(4)), texts(4), 2.0)), torch.cat(apart))
    f.network.read.clear()
    last(consistency_steps(f, [80.0, 1.0], SampleStreams(range(4)), texts(4)))
    assert [read.tolist() for read in f.network.read] == [[1.0, 2.0, 3.0, 4.0]] * 2


@pytest.mark.parametrize("name", ["ddpmpp", "edm2"])
def test_a_network_of_classes_refuses_texts(name: str) -> None:
    network = NETWORKS[name](channels=8, channel_mult=(1,), blocks=1, attention=()).build((1, 2, 2), Classes(3))
    with pytest.raises(TcmError, match="a TextEmbeddings condition does not fit this network; give it class labels"):
        network(torch.zeros(2, *SHAPE), torch.zeros(2), texts(2), None)


@pytest.mark.parametrize("name", ["ddpmpp", "edm2"])
def test_a_mix_of_classes_lies_between_them(name: str) -> None:
    network = NETWORKS[name](channels=8, channel_mult=(1,), blocks=1, attention=()).build((1, 2, 2), Classes(3))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        x, c_noise = torch.randn(3, *SHAPE), torch.zeros(3)
        labels = network(x, c_noise, Labels(torch.tensor([2, 0, -1])), None)
        whole = ClassMix(torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]))
        torch.testing.assert_close(network(x, c_noise, whole, None), labels)
        mixed = network(x[:1], c_noise[:1], ClassMix(torch.tensor([[0.5, 0.0, 0.5]])), None)
        assert not torch.allclose(mixed, labels[:1], rtol=1e-3)

"""KID, precision and recall, and the Inception score against plain implementations."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree
from torch.utils._python_dispatch import TorchDispatchMode

from tcm.evaluation.formulas import inception_score, kernel_distance, precision_recall
from tcm.foundation.devices import best_device
from tcm.foundation.errors import TcmError


def normal(count: int, dimension: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.randn(count, dimension, generator=torch.Generator().manual_seed(seed)) + shift


def plain_kernel_distance(x: np.ndarray, y: np.ndarray) -> float:
    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        return float((a @ b / len(a) + 1) ** 3)

    n, m = len(x), len(y)
    within_x = sum(kernel(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    within_y = sum(kernel(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return within_x + within_y - 2 * sum(kernel(a, b) for a in x for b in y) / (n * m)


def test_kernel_distance_equals_the_double_sum() -> None:
    x, y = normal(40, 6, 0), normal(40, 6, 1, shift=0.5)
    found = kernel_distance(x, y, subsets=1)
    assert found.mean == pytest.approx(plain_kernel_distance(x.double().numpy(), y.double().numpy()), rel=1e-9)
    assert found.deviation == 0


def test_kernel_distance_is_unbiased_and_repeats() -> None:
    x, y = normal(1000, 8, 2), normal(1000, 8, 3)
    one = kernel_distance(x, y, subsets=50, size=100)
    assert one == kernel_distance(x, y, subsets=50, size=100)
    assert abs(one.mean) < 3 * one.deviation / math.sqrt(50) + 0.01
    assert kernel_distance(x, y + 1, subsets=5, size=100).mean > 1


def test_precision_and_recall_equal_brute_force() -> None:
    generated, real = normal(60, 3, 4, shift=0.7), normal(80, 3, 5)

    def inside(points: np.ndarray, manifold: np.ndarray) -> float:
        radii = [
            sorted(np.linalg.norm(m - other) for j, other in enumerate(manifold) if j != i)[2]
            for i, m in enumerate(manifold)
        ]
        hits = [any(np.linalg.norm(p - m) <= r for m, r in zip(manifold, radii, strict=True)) for p in points]
        return float(np.mean(hits))

    found = precision_recall(generated, real)
    assert found.precision == pytest.approx(inside(generated.numpy(), real.numpy()))
    assert found.recall == pytest.approx(inside(real.numpy(), generated.numpy()))
    assert 0 < found.precision < 1


def whole(features: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """All distances at once: what the blocks must add up to."""

    def inside(points: torch.Tensor, manifold: torch.Tensor) -> float:
        radii = torch.cdist(manifold, manifold).kthvalue(4, dim=1).values
        return float((torch.cdist(points, manifold) <= radii).any(1).double().mean())

    return inside(features, reference), inside(reference, features)


@pytest.mark.parametrize("block", [1, 2, 7, 50, 79, 80, 1000])
def test_blocks_of_any_size_give_the_same_precision_and_recall(block: int) -> None:
    generated, real = normal(50, 5, 9, shift=0.8).double(), normal(80, 5, 10).double()
    found = precision_recall(generated, real, block=block)
    assert (found.precision, found.recall) == whole(generated, real)


def test_precision_and_recall_agree_with_scipys_search_tree() -> None:
    generated, real = normal(300, 6, 11, shift=0.6).double(), normal(500, 6, 12).double()

    def inside(points: torch.Tensor, manifold: torch.Tensor) -> float:
        tree = cKDTree(manifold.numpy())
        radii = tree.query(manifold.numpy(), k=4)[0][:, 3]
        covered = {p for p in range(len(points)) if any(
            np.linalg.norm(points[p].numpy() - manifold[m].numpy()) <= radii[m]
            for m in tree.query_ball_point(points[p].numpy(), radii.max())
        )}  # fmt: skip
        return len(covered) / len(points)

    found = precision_recall(generated, real)
    assert (found.precision, found.recall) == (inside(generated, real), inside(real, generated))
    assert 0.05 < found.precision < 0.95


class Largest(TorchDispatchMode):
    """Notes the most numbers that any tensor made inside of the block holds."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_the_memory_of_precision_and_recall_does_not_grow_with_the_images() -> None:
    """Blocks of all columns took 10 GB on ImageNet."""
    with Largest() as few:
        precision_recall(normal(150, 2, 13), normal(150, 2, 14), block=50)
    with Largest() as many:
        precision_recall(normal(300, 2, 13), normal(900, 2, 14), block=50)
    assert 2500 <= few.numel == many.numel <= 2500 + 4 * 50


@pytest.mark.gpu
@pytest.mark.skipif(best_device().type == "cpu", reason="no accelerator here")
def test_precision_and_recall_are_computed_where_the_features_are() -> None:
    generated, real = normal(300, 64, 15, shift=0.2), normal(500, 64, 16)
    found = precision_recall(generated.to(best_device()), real.to(best_device()), block=128)
    precision, recall = whole(generated.double(), real.double())
    assert (found.precision, found.recall) == (pytest.approx(precision, abs=0.02), pytest.approx(recall, abs=0.02))


def test_precision_and_recall_of_collapse_and_of_copies() -> None:
    real = normal(200, 4, 6)
    copies = precision_recall(real.clone(), real)
    assert (copies.precision, copies.recall) == (1, 1)
    collapsed = precision_recall(real[:1] + 1e-3 * normal(50, 4, 7), real)
    assert collapsed.precision == 1
    assert collapsed.recall < 0.05


def test_inception_score_equals_its_formula() -> None:
    probabilities = torch.rand(100, 7, generator=torch.Generator().manual_seed(8)).softmax(1)
    values = []
    for part in probabilities.double().numpy().reshape(10, 10, 7):
        marginal = part.mean(0)
        values.append(math.exp(sum((p * np.log(p / marginal)).sum() for p in part) / 10))
    found = inception_score(probabilities)
    assert found.mean == pytest.approx(np.mean(values), rel=1e-9)
    assert found.deviation == pytest.approx(np.std(values), rel=1e-6)


def test_inception_score_of_sure_and_even_classes_is_their_number() -> None:
    assert inception_score(torch.eye(10).repeat(10, 1)).mean == pytest.approx(10)
    assert inception_score(torch.full((50, 10), 0.1)).mean == pytest.approx(1)


def test_too_few_images_are_refused() -> None:
    with pytest.raises(TcmError, match="at least 2"):
        kernel_distance(normal(1, 3, 0), normal(5, 3, 0))
    with pytest.raises(TcmError, match="same detector"):
        kernel_distance(normal(5, 3, 0), normal(5, 4, 0))
    with pytest.raises(TcmError, match="at least 4"):
        precision_recall(normal(3, 3, 0), normal(9, 3, 0))
    with pytest.raises(TcmError, match="10 parts"):
        inception_score(torch.full((9, 10), 0.1))

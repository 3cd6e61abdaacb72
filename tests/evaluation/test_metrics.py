"""KID, precision and recall, and the Inception score against plain implementations."""

import math

import numpy as np
import pytest
import torch

from tcm.errors import TcmError
from tcm.evaluation.metrics import inception_score, kernel_distance, precision_recall


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

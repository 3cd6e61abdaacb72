"""Every example in a docstring of the package and of the oracles runs."""

import doctest
import importlib
import pkgutil

import oracles
import pytest

import tcm

MODULES = [module.name for module in pkgutil.walk_packages(tcm.__path__, "tcm.")] + ["tcm", oracles.__name__]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name: str) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_examples_are_found() -> None:
    found = [doctest.DocTestFinder().find(importlib.import_module(name)) for name in MODULES]
    assert sum(len(test.examples) for tests in found for test in tests) > 20

# Each target installs what it needs into .venv; a second call installs nothing.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Twice as many as two cores: tests often wait for processes that they start.
WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=worksteal

.PHONY: help setup demo test coverage test-portable test-gpu check bench clean
help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/'

.venv/.user: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) --editable .
	touch $@

.venv/.dev: .venv/.user
	$(PIP) --editable '.[dev]'
	touch $@

setup: .venv/.user  ## install tcm into .venv

demo: .venv/.user  ## train the whole method on handwritten digits, measure it, show the report
	$(BIN)/tcm demo

test: .venv/.dev  ## run the tests; those of the report need a browser (Debian: apt-get install chromium)
	$(PYTEST)

coverage: .venv/.dev  ## run the tests and show which lines they miss
	$(PYTEST) --cov=tcm --cov-report=term:skip-covered

test-portable: .venv/.dev  ## run the numerical tests with the lowest instruction set, as the oldest CPU would
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 $(PYTEST) tests/method tests/networks

test-gpu: .venv/.dev  ## run the tests that need an accelerator, on one or more of them
	$(BIN)/python -m pytest -m gpu tests

check: .venv/.dev  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.dev  ## measure speed and memory, as ratios
	$(BIN)/python -m benchmarks

clean:  ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Every target sets up .venv by itself. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test lint format proofs bench clean

run: .venv/.base        ## a demonstration on the mock model
	$(BIN)/outrider demo

test: lint              ## lint, types and tests
	$(BIN)/python -m pytest -n auto

lint: .venv/.dev
	$(BIN)/ruff check src tests examples
	$(BIN)/ruff format --check src tests examples
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix src tests examples
	$(BIN)/ruff format src tests examples

proofs: .venv/.dev      ## the whole grid of joint-distribution proofs
	$(BIN)/python -m pytest -n auto -m "slow or not slow" tests/test_law.py

bench: .venv/.base      ## engine time per token on a mock that costs nothing
	$(BIN)/outrider bench

clean:
	rm -rf .venv

.venv/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/.dev: .venv/.base
	$(INSTALL) -e '.[dev]'
	touch $@

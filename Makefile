# Two commands matter: `make demo` and `make test`. Each sets up what it needs on a fresh machine. `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# The tests start hundreds of Python processes: without caches of bytecode each of them would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint docs backtest bench clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|'

demo: $(VENV)/.demo ## a simulated cluster behind real SSH, watched by the real watcher (DEMO="--list" and other options)
	$(BIN)/wattwatch demo $(DEMO)

test: $(VENV)/.dev lint ## lint, types and all tests
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(VENV)/.dev ## ruff, mypy and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.dev ## write the documents that are generated from the code
	$(BIN)/wattwatch config --reference --markdown > docs/configuration.md

# What the rules get right on public cases: the committed result shows what a change of them does.
backtest: $(VENV)/.dev ## score the verdicts on labeled public cases and write the committed result
	$(BIN)/wattwatch backtest tests/data/backtest --out tests/data/backtest/result.json

bench: $(VENV)/.dev ## all benchmarks; each prints figures and ratios
	$(BIN)/python -m tests.benchmarks.watch_nodes
	$(BIN)/python -m tests.benchmarks.detection
	$(BIN)/python -m tests.benchmarks.diagnose
	$(BIN)/python -m tests.benchmarks.gate
	$(BIN)/python -m tests.benchmarks.pack
	$(BIN)/python -m tests.benchmarks.train
	$(BIN)/python -m tests.benchmarks.checkpoint

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "wattwatch needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
			"Name another with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "python3-venv is missing; installing it (apt-get)"; rm -rf $(VENV); \
		$$(command -v sudo) apt-get update -qq && $$(command -v sudo) apt-get install -y -qq python3-venv && \
		$(PYTHON) -m venv $(VENV); }

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

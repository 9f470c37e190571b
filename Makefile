# `make help` lists the targets. Each does all the set-up it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.raypack-installed
ARGS ?=

# Cheapest kind first; ranks or Ray start only after the pure tests have been seen.
STAGES := "not pool and not ray" "pool and not ray" "ray"

.PHONY: help setup train test test-rest test-all mutants chaos lint format bench dashboards docs clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(STAMP) ## make .venv from the lock and install raypack editable

$(STAMP): requirements-cpu.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("error: raypack needs Python 3.11 or newer, %s is %d.%d: make PYTHON=python3.11 ..." % (sys.executable, sys.version_info[0], sys.version_info[1]))'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements-cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

train: $(STAMP) ## train the default 1F3S model on 4 local workers (ARGS="--section.key value")
	$(BIN)/raypack train $(ARGS)

# One thread a process: the ranks of a pool share the cores. Ray's token authentication is for clusters, not tests.
test test-rest test-all: export OMP_NUM_THREADS ?= 1
test test-rest test-all: export RAY_AUTH_MODE ?= disabled

test: $(STAMP) ## within 10 minutes: pure, then several ranks, then Ray (ARGS goes to pytest)
	@$(call run_stages,not rest and not slow)

test-rest: $(STAMP) ## what else a change must pass: nodes that die, ends of jobs, clusters, chaos, bytes of the kernel
	@$(call run_stages,rest and not slow)

test-all: $(STAMP) ## both, and the slow ones
	@$(call run_stages,slow or not slow)

# pytest's exit code 5 means that a stage has no test.
define run_stages
failed=0; for stage in $(STAGES); do \
	echo "== tests: $$stage"; \
	$(BIN)/python -m pytest -m "($$stage) and ($(1))" $(ARGS) || { code=$$?; test $$code -eq 5 || failed=$$code; }; \
done; exit $$failed
endef

lint: $(STAMP) ## ruff (lint and format), mypy, vulture (dead code)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vulture

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

mutants: $(STAMP) ## make small wrong edits in a copy: which one does its test not catch (ARGS="--list --only NAME")
	$(BIN)/python -m tests.mutants $(ARGS)

chaos: export OMP_NUM_THREADS ?= 1

chaos: $(STAMP) ## kill a run's processes a hundred times (ARGS="--kills N --seed S")
	$(BIN)/python -m tests.chaos $(ARGS)

bench: $(STAMP) ## every benchmark's table (ARGS="--only NAME --quick")
	$(BIN)/python -m benchmarks $(ARGS)

dashboards: $(STAMP) ## write dashboards/*.json and the table of docs/metrics.md from the metric declarations
	$(BIN)/python -m dashboards.generate

docs: $(STAMP) ## write docs/run-file.md from the settings
	$(BIN)/python -m raypack.config.help docs/run-file.md

clean: ## remove the environment and caches; runs and corpora stay
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

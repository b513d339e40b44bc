# What there is to do; every target works from a fresh clone, by itself, and under -j.
# `make` installs into .venv again only when pyproject.toml is newer than the last installation.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

# Only one make at a time may install (two terminals, one .venv); where flock is missing, it goes unguarded.
LOCK := $(if $(shell command -v flock 2>/dev/null),flock Makefile,)

# The demo needs less than the tests; asked for both, or once the tests have run, the larger set serves both.
NEEDS_DEV := $(filter test quick memory check bench soak format,$(MAKECMDGOALS)) $(wildcard $(VENV)/.installed-dev)
DEMO_STAMP := $(VENV)/.installed-$(if $(strip $(NEEDS_DEV)),dev,demo)

.DEFAULT_GOAL := help
.PHONY: help demo test quick test-versions memory check format bench soak clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO_STAMP) ## classify handwritten digits on two worker processes
	$(BIN)/python examples/demo.py

# Workers in one process count all that it holds as theirs, so their tests get a small one.  Real models and ONNX's suite
# take over 1 GB beside what a process has imported, so they come before PyTorch and others.  All three parts always run.
# In the last one a third process has what waits for SLURM and for workers (tests/lanes.py).
LEAVING := tests/runtime/elastic/test_retirement.py
SUITE := tests/suite
# K is files, folders or names below tests/, or words of their names as of pytest's -k; with it, one process runs them.
K ?=
# A process with many threads keeps memory in an arena for each: two are enough, and hold less that nothing uses.
test quick soak: export MALLOC_ARENA_MAX = 2
test: $(VENV)/.installed-dev ## the whole test suite, but for what takes many minutes; K=steal or K=tests/policy: a part
ifneq ($(strip $(K)),)
	$(BIN)/python -m pytest -q -m "not soak" $(if $(filter tests/%,$(K)),$(K),-k '$(K)')
else
	@status=0; set -x; \
	$(BIN)/python -m pytest -q $(LEAVING) || status=$$?; \
	$(BIN)/python -m pytest -q -m "not soak" -n 2 --dist loadfile --no-loadscope-reorder $(SUITE) || status=$$?; \
	$(BIN)/python -m pytest -m "not soak" -n 3 --dist loadfile --no-loadscope-reorder \
	    --ignore $(LEAVING) --ignore $(SUITE) || status=$$?; \
	exit $$status
endif

quick: $(VENV)/.installed-dev ## tests that start no cluster and no process: under a minute
	$(BIN)/python -m pytest -q --quick -n 2 --dist loadfile -m "not soak and not suite and not gpu"

test-versions: | $(VENV)/bin/python ## the fast tests on the oldest, a middle and the newest releases that pyproject.toml admits
	$(BIN)/python -m tests.versions

memory: $(VENV)/.installed-dev ## the whole test suite, and the most memory that it held
	$(BIN)/python -m tests.peak $(MAKE) test

check: $(VENV)/.installed-dev ## lint, format, types, the floors that modules import across, and the counts of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house

format: $(VENV)/.installed-dev ## mend what lint and format can mend by themselves
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev ## the benchmarks at full size; tables here, JSON beside them
	$(BIN)/python benchmarks/inference.py --json benchmarks/results/inference.json
	$(BIN)/python benchmarks/overhead.py --json benchmarks/results/overhead.json
	$(BIN)/python benchmarks/memory.py --json benchmarks/results/memory.json
	$(BIN)/python benchmarks/scheduling.py --json benchmarks/results/scheduling.json
	$(BIN)/python benchmarks/elastic.py --json benchmarks/results/elastic.json
	$(BIN)/python benchmarks/preemption.py --json benchmarks/results/preemption.json
	$(BIN)/python benchmarks/views.py --json benchmarks/results/views.json
	$(BIN)/python benchmarks/heterogeneous.py --json benchmarks/results/heterogeneous.json
	$(BIN)/python benchmarks/parallel.py --json benchmarks/results/parallel.json

soak: $(VENV)/.installed-dev ## the tests that take many minutes
	$(BIN)/python -m pytest -m soak

clean: ## remove what the other targets made, .venv included
	rm -rf $(VENV) .venv-versions .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-demo: pyproject.toml | $(VENV)/bin/python
	$(LOCK) $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[examples,dashboard]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(VENV)/bin/python
	$(LOCK) $(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "dask_ferro needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is" \
	         "$$($(PYTHON) --version 2>&1 | tail -1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	    echo "'$(PYTHON)' cannot make virtual environments: install the python3-venv package" >&2; exit 1; }
	$(LOCK) $(PYTHON) -m venv $(VENV)

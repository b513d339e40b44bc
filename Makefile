# `make` lists the targets.  Every target works from a fresh clone, alone, and under -j.
# `make` installs into .venv again only when pyproject.toml is newer than the last installation.

PYTHON ?= python3
VENV   := .venv
# A virtual environment on Windows has Scripts/python.exe.
WINDOWS := $(filter Windows_NT,$(OS))
BIN     := $(VENV)/$(if $(WINDOWS),Scripts,bin)
INTERPRETER := $(BIN)/python$(if $(WINDOWS),.exe)

# Only one make at a time may install (two terminals, one .venv); without flock, installations are not guarded.
LOCK := $(if $(shell command -v flock 2>/dev/null),flock Makefile,)

# The demo needs fewer packages than the tests; if both are made, or the tests have run before, the larger set serves both.
NEEDS_DEV := $(filter test quick check docs bench soak format,$(MAKECMDGOALS)) $(wildcard $(VENV)/.installed-dev)
DEMO_STAMP := $(VENV)/.installed-$(if $(strip $(NEEDS_DEV)),dev,demo)

.DEFAULT_GOAL := help
.PHONY: help demo test quick test-versions check docs format bench soak clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

demo: $(DEMO_STAMP) ## classify handwritten digits on two worker processes
	$(BIN)/python examples/demo.py

# Workers in one process count all of its memory as theirs, so the tests of retirement get a small process of their own;
# they mostly wait, beside the next part.  Real models and ONNX's suite take over 1 GB beside the imports of a process, so
# they run before tests that import PyTorch and others.  All three parts always run.  In the last one, a third process
# begins with the tests that wait for SLURM and for workers (tests/lanes.py).
LEAVING := tests/elastic/test_retirement.py
SUITE := tests/suite
# K: files or folders below tests/, or an expression for pytest's -k; one process runs these tests.
K ?=
# glibc keeps an arena of memory for many of a process's threads: two arenas are enough, and hold less unused memory.
test quick soak: export MALLOC_ARENA_MAX = 2
# pip compiles nothing: of eight million lines three quarters are never imported, and what is, is compiled once.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable
export PYTHONDONTWRITEBYTECODE =
test: $(VENV)/.installed-dev ## the whole test suite except `soak`; with K=steal or K=tests/policy, a part of it
ifneq ($(strip $(K)),)
	$(BIN)/python -m pytest -q -m "not soak" $(if $(filter tests/%,$(K)),$(K),-k '$(K)')
else
	@status=0; set -x; \
	$(BIN)/python -m pytest -q -p no:cacheprovider $(LEAVING) >$(VENV)/leaving.log 2>&1 & leaving=$$!; \
	trap "kill $$leaving; exit 130" INT; \
	$(BIN)/python -m pytest -q -m "not soak" -n 2 --dist worksteal $(SUITE) || status=$$?; \
	wait $$leaving || status=$$?; trap - INT; cat $(VENV)/leaving.log; \
	$(BIN)/python -m pytest -m "not soak" -n 3 --dist loadfile --no-loadscope-reorder \
	    --ignore $(LEAVING) --ignore $(SUITE) || status=$$?; \
	exit $$status
endif

# Of each room a file or two of decisions and plain values, which start no process: 30 s of two cores.
QUICK := policy graph/autodiff/test_autodiff.py graph/bundling/test_summary.py graph/model/test_load.py \
    graph/parallel/test_apply.py graph/pipeline/test_schedule.py graph/sharding/test_redistribute.py \
    graph/tensor/test_tensor.py engines/array/test_program.py lower/bundling/test_recent.py \
    stream/test_chunks.py train/test_scaling.py train/test_states.py simulate/test_engine.py \
    slurm/test_parsing.py observe/test_rules.py views/test_terminal.py
quick: $(VENV)/.installed-dev ## decisions and plain values, without a cluster or a process; under a minute
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not soak" $(QUICK:%=tests/%)

test-versions: | $(INTERPRETER) ## the tests that depend on Dask, with its oldest, a middle and its newest release
	$(BIN)/python -m tests.versions

check: $(VENV)/.installed-dev ## lint, format, spelling, types, import layers, and tests/house: lines by room, private names, circles, names, English
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.house
	$(BIN)/python -m tests.house.sentences

docs: $(VENV)/.installed-dev ## the site of docs/, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

format: $(VENV)/.installed-dev ## apply the automatic fixes of lint and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.installed-dev ## all benchmarks at full size; prints tables, writes JSON to benchmarks/results
	$(BIN)/python benchmarks/inference.py --json benchmarks/results/inference.json
	$(BIN)/python benchmarks/overhead.py --json benchmarks/results/overhead.json
	$(BIN)/python benchmarks/memory.py --json benchmarks/results/memory.json
	$(BIN)/python benchmarks/scheduling.py --json benchmarks/results/scheduling.json
	$(BIN)/python benchmarks/bundles.py --workers 2 4 8 --json benchmarks/results/bundles.json
	$(BIN)/python benchmarks/real.py --json benchmarks/results/real.json
	$(BIN)/python benchmarks/replay.py --json benchmarks/results/replay.json
	$(BIN)/python benchmarks/elastic.py --json benchmarks/results/elastic.json
	$(BIN)/python benchmarks/ablation.py --json benchmarks/results/ablation.json
	$(BIN)/python benchmarks/preemption.py --json benchmarks/results/preemption.json
	$(BIN)/python benchmarks/views.py --json benchmarks/results/views.json
	$(BIN)/python benchmarks/heterogeneous.py --json benchmarks/results/heterogeneous.json
	$(BIN)/python benchmarks/parallel.py --json benchmarks/results/parallel.json
	$(BIN)/python benchmarks/training.py --json benchmarks/results/training.json
	$(BIN)/python benchmarks/jobs.py $(if $(RAY_PYTHON),--ray-python $(RAY_PYTHON)) --json benchmarks/results/jobs.json
	$(BIN)/python benchmarks/goals.py

soak: $(VENV)/.installed-dev ## the tests that take many minutes
	$(BIN)/python -m pytest -m soak

clean: ## remove everything that the other targets made, including .venv
	rm -rf $(VENV) .venv-versions .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist build site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.installed-demo: pyproject.toml | $(INTERPRETER)
	$(LOCK) $(INSTALL) '.[examples,dashboard]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(INTERPRETER)
	$(LOCK) $(INSTALL) '.[dev]'
	@touch $@

$(INTERPRETER):
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || { \
	    echo "dask_ferro needs Python 3.11, 3.12 or 3.13; '$(PYTHON)' is" \
	         "$$($(PYTHON) --version 2>&1 | tail -1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
	    echo "'$(PYTHON)' cannot make virtual environments: install the python3-venv package" >&2; exit 1; }
	$(LOCK) $(PYTHON) -m venv $(VENV)

# The commands of README.md. `make test` is what continuous integration runs.
#
# PYTHON makes the virtual environment and is not used after that. Nothing here needs a network once
# everything in constraints.txt is installed. For a machine without a GPU see constraints.txt.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?=
TORTURE_ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 4

# Some virtual CPUs announce AMX and then kill the process that uses it.
ONEDNN_MAX_CPU_ISA ?= AVX2
export ONEDNN_MAX_CPU_ISA

# Hundreds of interpreters are started: without its bytecode each compiles laststep anew.
PYTHONDONTWRITEBYTECODE :=
export PYTHONDONTWRITEBYTECODE

FRAMEWORKS := .venv-frameworks
NEWEST := .venv-newest
# PyTorch's own tests of DCP, for test-newest: the folder test/distributed/checkpoint of a checkout of
# the release of torch that is installed.
TORCH_TESTS ?=

# The oldest releases that adapters accept, where constraints.txt has newer ones.
OLDEST := transformers==5.22.2

.PHONY: help install demo test test-long test-frameworks test-frameworks-oldest test-newest docs format lint types compiled layers tests soak torture bench clean

help:
	@echo "make install   $(VENV) with all that is needed; the others do it first. It downloads torch:"
	@echo "               minutes, and gigabytes with CUDA; for the small CPU wheel, before anything else:"
	@echo "               PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install"
	@echo "make demo      train, kill, resume: what laststep does, in a minute"
	@echo "make test      everything that must be green: style, types, layers, tests"
	@echo "make test-long more pairs of layouts, more ranks with DCP"
	@echo "make test-frameworks  the adapters, with the real frameworks, in $(FRAMEWORKS): gigabytes, half an hour"
	@echo "make test-frameworks-oldest  those with $(OLDEST), in $(FRAMEWORKS)-oldest"
	@echo "make test-newest  all of it with the newest torch and frameworks, in $(NEWEST): gigabytes, an hour."
	@echo "               It takes a newer Python too: make test-newest PYTHON=python3.13"
	@echo "make torture   tests/torture: more than 10,000 faults of every kind, in two hours"
	@echo "make soak      an hour of saves to three tiers, with faults in each"
	@echo "make docs      the documentation as a site, in build/site"
	@echo "make bench     measure on this machine"
	@echo "make clean     remove what the above left behind, except $(VENV)"

# The build tools come first and the build uses them as they are, instead of downloading its own
# copies each time.
$(STAMP): pyproject.toml constraints.txt
	@echo "== install into $(VENV): laststep, torch and the tools of constraints.txt"
	@echo "   The first time this downloads torch, which takes minutes: gigabytes with CUDA. Without a GPU:"
	@echo "   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make install"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install --no-build-isolation -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP)

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

# One recipe, not five prerequisites: the stages run in this order under `make -j` too.
test: $(STAMP)
	@$(MAKE) --no-print-directory format
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory types compiled -j 2
	@$(MAKE) --no-print-directory layers
	@$(MAKE) --no-print-directory tests

format: $(STAMP)
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check

lint: $(STAMP)
	@echo "== ruff check"
	@$(BIN)/ruff check --quiet && echo "no finding"

types: $(STAMP)
	@echo "== mypy"
	@$(BIN)/mypy

# Once, beside mypy, which uses one core: else each worker of pytest compiles all tests for itself.
compiled: $(STAMP)
	@$(BIN)/python -m compileall -q src
	@$(BIN)/python -m pytest -q --collect-only > /dev/null 2>&1 || true

layers: $(STAMP)
	@echo "== lint-imports"
	@$(BIN)/lint-imports

# Four files at a time on two cores: much of it is waiting, for disks, and for processes to start and
# to die.
tests: $(STAMP)
	@echo "== pytest, $(WORKERS) files at a time"
	@$(BIN)/python -m pytest -q --tb=short -n $(WORKERS) --dist loadfile --max-worker-restart 0 \
		--no-loadscope-reorder $(PYTEST_ARGS)

test-long: $(STAMP)
	@echo "== pytest -m long"
	@$(BIN)/python -m pytest -q --tb=short -m long $(PYTEST_ARGS)

# In environments of their own: they bring much, and ask for versions of each other. DeepSpeed looks
# at torch while it is built, so it sees the one that is installed.
$(FRAMEWORKS)/.installed $(FRAMEWORKS)-oldest/.installed: pyproject.toml constraints.txt
	@echo "== install into $(@D): laststep, torch and the frameworks"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet -c constraints.txt hatchling editables setuptools wheel torch
	@DS_BUILD_OPS=0 $(@D)/bin/python -m pip install --quiet --no-build-isolation -c constraints.txt \
		-e '.[dev,frameworks]'
	@case $@ in *-oldest/*) $(@D)/bin/python -m pip install --quiet $(OLDEST);; esac
	@touch $@

test-frameworks: $(FRAMEWORKS)/.installed
	@echo "== pytest tests/frameworks tests/adapters, and the pages that need frameworks"
	@$(FRAMEWORKS)/bin/python -m pytest -q --tb=short -n 2 --dist loadfile -m "long or not long" \
		tests/frameworks tests/adapters $(PYTEST_ARGS)
	@$(FRAMEWORKS)/bin/python -m pytest -q --tb=short tests/test_docs.py -k what_it_needs

test-frameworks-oldest: $(FRAMEWORKS)-oldest/.installed
	@echo "== pytest tests/frameworks/test_hf.py tests/adapters/test_hf.py, with $(OLDEST)"
	@$(FRAMEWORKS)-oldest/bin/python -m pytest -q --tb=short -n 2 --dist loadfile -m "long or not long" \
		tests/frameworks/test_uses.py tests/frameworks/test_hf.py tests/adapters/test_hf.py $(PYTEST_ARGS)

# Only the tools of the tests are held at their versions, and torch at that which was the newest: a
# framework that wants an older one is not to replace it. One that does not install is named.
$(NEWEST)/.installed: pyproject.toml constraints.txt
	@echo "== install into $(NEWEST): laststep, and the newest torch and frameworks"
	@test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	@grep -E '^(pytest|execnet|hypothesis|seaweedfs|hatchling|editables)' constraints.txt > $(NEWEST)/held
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade -c $(NEWEST)/held \
		hatchling editables setuptools wheel torch numpy
	@$(NEWEST)/bin/python -m pip freeze | grep '^torch==' >> $(NEWEST)/held
	@$(NEWEST)/bin/python -m pip install --quiet --upgrade --no-build-isolation -c $(NEWEST)/held \
		-e '.[dev]' expecttest psutil
	@for framework in accelerate datasets deepspeed lightning megatron-core peft 'ray[train]' torchtitan \
			transformers trl; do \
		DS_BUILD_OPS=0 $(NEWEST)/bin/python -m pip install --quiet --upgrade --no-build-isolation \
			-c $(NEWEST)/held "$$framework" || echo "$$framework does not install"; \
	done
	@touch $@

# All parts run, whatever becomes of those before.
test-newest: $(NEWEST)/.installed
	@$(NEWEST)/bin/python -VV
	@$(NEWEST)/bin/python -m pip list --format freeze | grep -E '^(torch|numpy|accelerate|datasets|deepspeed|lightning|megatron_core|megatron-core|peft|ray|torchtitan|transformers|trl)=='
	@failed=0; \
	echo "== pytest, without the tests of frameworks"; \
	$(NEWEST)/bin/python -m pytest -q --tb=short -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		--ignore tests/frameworks --ignore tests/adapters $(PYTEST_ARGS) || failed=1; \
	echo "== pytest tests/frameworks tests/adapters tests/newest"; \
	$(NEWEST)/bin/python -m pytest -q --tb=short -n 2 --dist loadfile -m "long or not long" \
		tests/frameworks tests/adapters tests/newest $(PYTEST_ARGS) || failed=1; \
	if test -n "$(TORCH_TESTS)"; then \
		echo "== PyTorch's own tests of DCP, on its storage and on ours"; \
		$(NEWEST)/bin/python tests/newest/dcp.py "$(TORCH_TESTS)" || failed=1; \
	else \
		echo "== PyTorch's own tests of DCP are left out: TORCH_TESTS names no folder of them"; \
	fi; \
	exit $$failed

soak: $(STAMP)
	@echo "== tests/soak/soak.py"
	@$(BIN)/python tests/soak/soak.py $(SOAK_ARGS)

torture: $(STAMP)
	@echo "== tests/torture/torture.py"
	@$(BIN)/python tests/torture/torture.py $(TORTURE_ARGS)

docs: $(STAMP)
	@echo "== mkdocs build --strict"
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict && echo "open build/site/index.html"

bench: $(STAMP)
	@$(BIN)/python -m bench $(BENCH_ARGS)

clean:
	rm -rf build dist htmlcov .coverage .pytest_cache .mypy_cache .ruff_cache \
		.import_linter_cache .hypothesis demo-run bench/out
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

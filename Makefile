# `make run` and `make test` work on a new clone with only Python 3.11: they set up .venv first.
PYTHON ?= python3.11
BIN := .venv/bin
# Even where it is set: every process that a test starts would compile the package anew, and pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup run style types lint check quick test side-by-side test-slow gpu-test coverage mutants chaos fuzz golden walk bench pages docs dist clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

run: setup
	$(BIN)/thinwire compare

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/basedpyright --warnings

lint: style types

# The fast check, at most two minutes: lint, the layers, one pass of the laws (convergence apart), doctests, real processes.
check: style
	$(MAKE) --no-print-directory -j2 types quick

quick: setup
	$(BIN)/pytest -n 2 --dist worksteal -m quick

# Four tests at a time on two cores, since many wait. Then those that do little but wait for dead and silent
# peers, and at last, alone, those that measure times on emulated links, and the lab's.
WAITING := $(patsubst %,tests/failures/test_%.py,peers culprits leavers torchrun) \
	tests/server/test_processes.py tests/chaos
BY_THE_CLOCK := tests/predict/test_probe.py tests/net/test_links.py \
	$(filter-out tests/lab/test_torchrun.py,$(wildcard tests/lab/test_*.py))
# Tests that failed in a part run once more, alone, and must pass then.
TWICE := sh tests/twice.sh

test: style
	$(MAKE) --no-print-directory -j2 side-by-side types
	$(TWICE) waiting $(BIN)/pytest -n 3 --dist loadfile $(WAITING)
	$(TWICE) by-the-clock $(BIN)/pytest $(BY_THE_CLOCK)

side-by-side: setup
	$(TWICE) side-by-side $(BIN)/pytest -n 4 --dist worksteal $(patsubst %,--ignore=%,$(WAITING) $(BY_THE_CLOCK))

test-slow: setup
	$(BIN)/pytest -m slow --timeout 1800

# What has to be shown on a card: docs/gpu.md. Without one every test is skipped, and says so.
gpu-test: setup
	$(BIN)/pytest -m gpu -rs tests/devices/test_gpu.py

# Which lines of the package the tests reach; worker processes are not counted.
coverage: setup
	$(BIN)/pytest -n 2 --cov=thinwire --cov-report=term:skip-covered $(patsubst %,--ignore=%,$(WAITING) $(BY_THE_CLOCK))

# Breaks the source in some forty places, one at a time, and shows which test notices.
mutants: setup
	$(BIN)/python -m tests.mutants

# A thousand seeded faults against every method and host, with invariants checked after each; takes an hour or two.
chaos: setup
	$(BIN)/python -m tests.chaos --count 1000

# Hostile payloads against every decoder, damaged checkpoints against every method.
fuzz: setup
	$(BIN)/python -m tests.fuzz_payloads --count 1000000
	$(BIN)/python -m tests.fuzz_checkpoints --count 5000

# Trajectories of every method and schedule: `make golden` before a change, `make golden ACTION=compare` after it.
ACTION ?= record
FILE ?= out/golden.json
golden: setup
	$(BIN)/python -m tests.golden $(ACTION) $(FILE)

# The files that Python enters for one gradient, from DDP's hook to the wire and back.
walk: setup
	$(BIN)/python -m tests.architecture.walk

bench: setup
	$(BIN)/python -m benchmarks all

# docs/methods, from the docstrings and the measured table.
pages: setup
	$(BIN)/python -m reproductions.method_pages

# The wheel and the source archive in dist/, checked.
dist: setup
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

# The documentation as a website, in out/site. A broken link, a page that is in no menu and an unknown name are errors.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv out dist

# `make run` and `make test` work on a new clone with only Python 3.11: they set up .venv first.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: setup run test test-slow lint bench clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

run: setup
	$(BIN)/thinwire compare

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright --warnings

# Tests run two at a time, except those that go by the clock: timeouts, dead peers, emulated links.
BY_THE_CLOCK := tests/failures/test_peers.py tests/failures/test_disagreement.py tests/lab tests/test_links.py

test: lint
	$(BIN)/pytest -n 2 $(BY_THE_CLOCK:%=--ignore=%)
	$(BIN)/pytest $(BY_THE_CLOCK)

test-slow: setup
	$(BIN)/pytest -m slow --timeout 1800

bench: setup
	$(BIN)/thinwire bench all

clean:
	rm -rf .venv out

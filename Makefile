# Two commands do everything, from nothing but Python >= 3.11, make and a network:
#   make demo    sets up .venv and runs the main job: record, train offline, mix with live
#   make test    sets up .venv, then lint and all tests

# The Python that .venv is made from; once .venv exists, it stays as it is.
PYTHON ?= python3
# Passed on: make demo ARGS="--seed 1", make test ARGS="-k mixed".
ARGS ?=
# Test processes: one more than there are processors, as many tests wait for others; more than 4 spend their
# time importing torch.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -lt 4 ] && echo $$((n + 1)) || echo 4)

# Tests begin hundreds of interpreters: what they import is compiled once, not by each of them.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Newer than what it depends on: the environment holds what pyproject.toml and constraints.txt ask for.
STAMP := .venv/.rlio-is-installed

# Microsoft's emulator of Azure storage comes from npm; without npm, or a network, its tests are skipped.
AZURITE := .node/azurite-3.35.0

.PHONY: help setup demo test soak lint format

help:
	@echo "make demo     set up, then record CartPole, train from the record, mix it with live experience"
	@echo "make test     set up, then lint and all tests"
	@echo "make soak     the tests that run for minutes or hours"
	@echo "make lint     ruff and mypy"
	@echo "make format   put the code into its one format"
	@echo "make setup    only create .venv and install rlio into it, editable"

setup: $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "rlio needs Python >= 3.11, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	       "name another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv .venv

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing rlio and its development tools into .venv: some minutes, once."
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	@touch $@

$(AZURITE):
	@command -v npm >/dev/null || { echo "no npm: the tests of Azure storage will be skipped"; exit 0; }; \
	echo "Installing Azurite into .node: half a minute, once."; \
	if npm install --prefix .node --no-audit --no-fund --loglevel=error --fetch-retries=1 \
	     --fetch-timeout=30000 azurite@3.35.0; then touch $@; \
	else echo "npm could not install it: the tests of Azure storage will be skipped"; fi

demo: $(STAMP)
	$(BIN)/rlio demo $(ARGS)

test: lint $(AZURITE)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup $(ARGS)

soak: $(STAMP) $(AZURITE)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m soak --timeout=7200 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

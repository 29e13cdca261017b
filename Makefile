# Two commands do everything, from nothing but Python >= 3.11, make and a network:
#   make demo    sets up .venv and runs the main job: record, train offline, mix with live
#   make test    sets up .venv, then lint and the tests, in minutes
#   make test-all   the long tests, further seeds, servers and permutations that `make test` leaves out
#   make test-lowest   sets up .venv-lowest, the oldest versions that pyproject.toml allows, then the main tests

# The Python that .venv is made from; once .venv exists, it stays as it is.
PYTHON ?= python3
# Passed on: make demo ARGS="--seed 1", make test ARGS="-k mixed".
ARGS ?=
# Test processes: two more than there are processors, as many tests wait for others; more than 4 spend their
# time importing torch. Those of `make test` wait little.
JOBS ?= $(if $(filter test,$(MAKECMDGOALS)),$(FEW),$(MANY))
CORES = $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
MANY = $(shell [ $(CORES) -lt 2 ] && echo 3 || echo 4)
FEW = $(shell [ $(CORES) -lt 4 ] && echo 2 || echo 4)

# Tests begin hundreds of interpreters: what they import is compiled once, not by each of them.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
# Newer than what it depends on: the environment holds what pyproject.toml and constraints.txt ask for.
STAMP := .venv/.rlio-is-installed

# Microsoft's emulator of Azure storage comes from npm; without npm, or a network, its tests are skipped.
AZURITE := .node/azurite-3.35.0
# From npm, too: `pyright --verifytypes` looks at every public type; mypy looks at the code.
PYRIGHT := .node/pyright-1.1.414

# An editable install that puts the checkout on sys.path. Setuptools' default one is a finder that comes after
# the path: a script beside a checkout folder called rlio would import that folder, as an empty namespace.
INSTALL = -m pip install --disable-pip-version-check --quiet --config-settings editable_mode=compat

# What `make test-lowest` runs beside the doctests: the main path of every public name, see tests/test_packaging.py.
LOWEST := public_names ragged infos videos structured_rows dates mapping_doubts kept_copies step_values hostile_steps hostile_values times recording_agents readme batch_builder mapped_input cli cli_errors episode_table options batch tables_as_batches multi_agent_batch multi_agent_episode \
  episode schema spaces arrow dataset parquet_writer json_writer outputs recording recording_input resolve \
  dataset_reader json_reader d4rl_reader foreign_parquet foreign_layouts convert format_files mapping rllib_recordings mixed_input shuffled_input \
  replay_store filter_functions following_replay paced_writer torch envs envs_atari pettingzoo connectors env_runner callbacks info \
  multi_agent_runner external sampler_input metrics policies torch_policy dqn behaviour_cloning policy_map \
  postprocessing worker_live checkpoint weaving spool verify_cli compact distributed_data real_servers far_file

.PHONY: help setup demo test test-all test-lowest test-integrations soak lint format

help:
	@echo "make demo     set up, then record CartPole, train from the record, mix it with live experience"
	@echo "make test     set up, then lint and the tests"
	@echo "make test-all the long tests, and further seeds, servers and permutations of these"
	@echo "make test-lowest   the main tests, with the oldest versions that pyproject.toml allows, and RLlib"
	@echo "make test-integrations   what other libraries say of the files that rlio writes"
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
	$(BIN)/python $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# Of the form .node/NAME-VERSION; the argument says which tests need it.
define from_npm
	@command -v npm >/dev/null || { echo "no npm: the tests of $(1) will be skipped"; exit 0; }; \
	echo "Installing $(notdir $@) into .node: half a minute, once."; \
	if npm install --prefix .node --no-audit --no-fund --loglevel=error --fetch-retries=1 \
	     --fetch-timeout=30000 $(subst -,@,$(notdir $@)); then touch $@; \
	else echo "npm could not install it: the tests of $(1) will be skipped"; fi
endef

$(AZURITE):
	$(call from_npm,Azure storage)

# One npm at a time.
$(PYRIGHT): | $(AZURITE)
	$(call from_npm,public types)

demo: $(STAMP)
	$(BIN)/rlio demo $(ARGS)

# The laws call fsync thousands of times, which takes 4 ms on a disk: the tests' files lie in memory where 4 GiB
# are free there. Those of `make test-all` and `make soak` lie on the disk.
test: export PYTEST_DEBUG_TEMPROOT ?= $(shell \
  [ "$$(df -k /dev/shm 2>/dev/null | awk 'END { print int($$4) }')" -gt 4194304 ] && echo /dev/shm)

# Lint runs beside the tests; what it printed is shown last if it failed. Mypy takes a quarter of a processor's
# time: at the lowest priority it would still run when the tests have ended.
test: $(STAMP) $(AZURITE)
	@said=$$(mktemp); nice -n 3 $(MAKE) --no-print-directory lint >"$$said" 2>&1 & lint=$$!; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -o tmp_path_retention_policy=failed $(ARGS); tests=$$?; \
	wait $$lint || { tests=$$?; cat "$$said"; }; rm -f "$$said"; exit $$tests

test-all: $(STAMP) $(AZURITE) $(PYRIGHT)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m "further and not soak" $(ARGS)

# Together with RLlib, which pins its gymnasium.
.venv-lowest/.rlio-is-installed: pyproject.toml constraints-lowest.txt | $(BIN)/python
	@echo "Installing the oldest versions into .venv-lowest: some minutes, once."
	$(BIN)/python -m venv --clear .venv-lowest
	.venv-lowest/bin/python $(INSTALL) -c constraints-lowest.txt -e '.[dev]' 'ray[rllib]'
	@touch $@

test-lowest: .venv-lowest/.rlio-is-installed
	.venv-lowest/bin/python -m pytest -n $(JOBS) --dist loadgroup rlio $(LOWEST:%=tests/test_%.py) $(ARGS)

# Under constraints.txt without the packages of which the library takes other versions.
define constraints_without
	grep -vE '^($(1))==' constraints.txt >$(@D)/constraints.txt
endef

# The libraries whose files rlio reads and writes say themselves what they find, in three environments, as RLlib
# and LeRobot pin what others do not take. All have the torch of constraints.txt. 2 GB each, less with torch's
# wheel for the CPU.
# TensorFlow takes older versions of h5py.
.venv-integrations/.rlio-is-installed: pyproject.toml constraints.txt tests/integrations/requirements.txt | $(BIN)/python
	@echo "Installing other libraries into .venv-integrations: some minutes, once."
	$(BIN)/python -m venv --clear .venv-integrations
	$(call constraints_without,h5py)
	.venv-integrations/bin/python $(INSTALL) -c .venv-integrations/constraints.txt -e '.[hdf5,images,rlds,video]' \
	  -r tests/integrations/requirements.txt
	@touch $@

# RLlib pins gymnasium.
.venv-rllib/.rlio-is-installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing RLlib into .venv-rllib: some minutes, once."
	$(BIN)/python -m venv --clear .venv-rllib
	$(call constraints_without,gymnasium)
	.venv-rllib/bin/python $(INSTALL) -c .venv-rllib/constraints.txt -e '.[rllib,hdf5]' 'ray[rllib]==2.60.0' \
	  msgpack-numpy pytest pytest-timeout
	@touch $@

# LeRobot's own requirements are left out: drivers of robots, and a torch older than that of constraints.txt.
.venv-lerobot/.rlio-is-installed: pyproject.toml constraints.txt tests/integrations/requirements-lerobot.txt | $(BIN)/python
	@echo "Installing LeRobot into .venv-lerobot: some minutes, once."
	$(BIN)/python -m venv --clear .venv-lerobot
	$(call constraints_without,datasets|fsspec|gcsfs|s3fs)
	.venv-lerobot/bin/python $(INSTALL) -c .venv-lerobot/constraints.txt -e '.[hdf5,images,video,pandas]' \
	  -r tests/integrations/requirements-lerobot.txt
	.venv-lerobot/bin/python $(INSTALL) --no-deps lerobot==0.4.4
	@touch $@

# Older versions of tools that read shards, each in a folder of its own.
OLDER_TOOLS = duckdb-1.0.0 duckdb-1.1.3 pandas-2.2.3 polars-1.0.0
OLDER = .venv-integrations/older-tools/.installed
$(OLDER): Makefile .venv-integrations/.rlio-is-installed
	rm -rf $(@D)
	$(foreach tool,$(OLDER_TOOLS),.venv-integrations/bin/python $(INSTALL) --no-deps -t $(@D)/$(tool) $(subst -,==,$(tool)) $(if $(findstring pandas,$(tool)),pytz tzdata) &&) true
	@touch $@

INTEGRATIONS = -m pytest --noconftest -o addopts="--strict-markers" -rs

# Each file runs where its library is, so none is skipped.
test-integrations: $(foreach of,integrations rllib lerobot,.venv-$(of)/.rlio-is-installed) $(OLDER)
	.venv-integrations/bin/python $(INTEGRATIONS) tests/integrations $(ARGS) \
	  --ignore-glob='*/test_rllib*.py' --ignore=tests/integrations/test_lerobot.py
	.venv-rllib/bin/python $(INTEGRATIONS) tests/integrations/test_rllib*.py $(ARGS)
	.venv-lerobot/bin/python $(INTEGRATIONS) tests/integrations/test_lerobot.py $(ARGS)
	.venv-lerobot/bin/python $(INTEGRATIONS) tests/test_lerobot.py tests/test_videos.py $(ARGS)

soak: $(STAMP) $(AZURITE)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup -m soak --timeout=7200 $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# SPDX-License-Identifier: Apache-2.0
# Each target works as the only command after `git clone`, with Python >= 3.11, a C compiler and a package registry.

SHELL := /bin/bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-full disassembler lint format bench clean distclean

VENV ?= .venv
# Workers: one a core, at most 8.
JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); [ $$n -gt 8 ] && n=8; echo $$n)
SHARDS ?= 4
SHARD ?=
SHARD_MINUTES ?= 60
ARGS ?=

# The first interpreter that is new enough and can make a virtual environment.
PYTHON ?= $(shell \
	for p in python3.11 python3.12 python3.13 python3 python; do \
	  $$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && \
	    { echo $$p; break; }; \
	done)

PIN_FILES := $(wildcard requirements/*.txt) pyproject.toml
# The stamp's name holds a hash of the pins: an environment is re-made only when they change.
STAMP := $(VENV)/.installed-$(shell cat $(PIN_FILES) | cksum | cut -d' ' -f1)
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --disable-pip-version-check --quiet --quiet

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

venv: $(STAMP) ## make the virtual environment with the exact pins

$(STAMP):
	@command -v $${CC:-cc} >/dev/null || { \
	  echo "error: no C compiler ($${CC:-cc}) was found, and the simulator needs one." >&2; \
	  echo "fix: install gcc or clang, or name it: CC=clang make ..." >&2; exit 1; }
	@$(RUN) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || { \
	  [ -n "$(PYTHON)" ] || { \
	    echo "error: no Python >= 3.11 with venv and ensurepip was found." >&2; \
	    echo "fix: install one (Debian: python3.11-venv), or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
	  echo "== making $(VENV) with $(PYTHON)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "== installing the pinned packages (about 2 minutes the first time)"
	@$(PIP) -r requirements/torch.txt
	@$(PIP) --no-deps $(foreach part,cpu sglang aiter test dev,-r requirements/$(part).txt)
	@$(PIP) --no-deps --no-build-isolation -e .
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP) ## decode through the plugin in a real SGLang, on the simulator
	@$(RUN) -m sgl_amd_mono simulate $(ARGS)

# For AMD's code objects; where none can be had the tests that need it fail and say so.
disassembler: ## llvm-objdump of LLVM 20 or newer: found, or installed where root has apt
	@.ci/disassembler || true

test: $(STAMP) disassembler ## the tests of every commit: a stated subset of each row
	@$(RUN) -m pytest -n $(JOBS) $(ARGS)

# Every row as written, one shard after the other; SHARD=2/4 runs only that one.
test-full: $(STAMP) disassembler ## every row as written, in shards of at most 60 minutes
	@status=0; \
	for i in $(if $(SHARD),$(firstword $(subst /, ,$(SHARD))),$$(seq 1 $(SHARDS))); do \
	  shard=$$i/$(if $(SHARD),$(lastword $(subst /, ,$(SHARD))),$(SHARDS)); \
	  echo "== shard $$shard"; \
	  timeout --kill-after=30 $(SHARD_MINUTES)m \
	    $(RUN) -m pytest -n $(JOBS) --full --shard $$shard $(ARGS) || { code=$$?; status=1; \
	      [ $$code -ne 124 ] || echo "error: shard $$shard took over $(SHARD_MINUTES) minutes: raise SHARDS" >&2; }; \
	done; exit $$status

lint: $(STAMP) ## ruff, formatting and spelling
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(VENV)/bin/codespell

format: $(STAMP) ## let ruff fix what it can
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

bench: $(STAMP) ## the simulator's own speed
	@$(RUN) -m benchmarks.sim_speed $(ARGS)

clean: ## remove caches, keep the virtual environment
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache

distclean: clean ## remove the virtual environment as well
	@rm -rf $(VENV)

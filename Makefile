# The two commands of the README are `make demo` and `make test`; both set everything up on a fresh clone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
NUMERICS ?= strict
CONFIG ?= deploy/configs/demo.yaml
PIP := $(BIN)/pip --disable-pip-version-check
needs = { echo "set-up: $(1) is missing; apt-get install $(2)"; exit 1; }
BUILD_TOOLS := scikit-build-core==1.1.2 nanobind==3.1.0 cmake ninja

.PHONY: help setup build model demo test test-soak lint bench gpu-build test-gpu bench-gpu clean ops-tools dashboards tour
help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*  ## /make \1  # /p' Makefile

setup: $(VENV)/.built  ## .venv, dependencies, C++ parts

$(VENV)/.installed: pyproject.toml CMakeLists.txt
	@command -v $(PYTHON) > /dev/null || $(call needs,$(PYTHON),python3.11; or say PYTHON=… (3.11))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || $(call needs,Python 3.11 in $(PYTHON),python3.11; or say PYTHON=…)
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2> /dev/null || $(call needs,Python.h,python3.11-dev)
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || $(call needs,venv with pip,python3.11-venv)
	@command -v c++ > /dev/null || $(call needs,a C++ compiler,g++)
	@echo | c++ -std=c++20 -fsyntax-only -x c++ - 2> /dev/null || $(call needs,C++20 in c++,g++)
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2> /dev/null || $(call needs,libnuma.so.1 (vLLM loads it),libnuma1)
	@echo "set-up 1/3: $(VENV) and build tools"
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -qq $(BUILD_TOOLS)
	@echo "set-up 2/3: torch, vLLM, Megatron-core, Ray (3.5 GB, about two minutes) and the C++ parts"
	@mkdir -p build && flock build/.lock $(PIP) install -qq --no-build-isolation -e '.[cpu,auditor,dev,ops]'
	@echo "set-up 3/3: removing vLLM's unused image and audio packages"
	@$(PIP) uninstall -qq -y torchvision torchaudio torchcodec
	@touch $@ $(VENV)/.built

# A changed C++ source is built before anything runs, so that nothing passes on yesterday's binary. An editable install
# remembers where every module was, so a new package asks for another one, too.
$(VENV)/.built: $(VENV)/.installed $(wildcard rl_kernel/csrc/*/*) $(shell find rl_kernel services auditor -name __init__.py)
	@mkdir -p build && flock build/.lock $(PIP) install -qq --no-build-isolation --no-deps -e .
	@touch $@

build: setup  ## C++ parts again, after a change under rl_kernel/csrc

model: setup  ## SmolLM2-135M-Instruct in models/, which demo fetches by itself
	@$(BIN)/python -m services.models

demo: setup  ## trains SmolLM2 with GRPO, audited while it runs; NUMERICS=native for the control group
	@$(BIN)/python -m services.main --config $(CONFIG) --numerics $(NUMERICS)

# Folders whose files compute on one core or wait, WORKERS at a time; then what wants the whole machine, one by one.
WORKERS ?= 2
SIDE_BY_SIDE := tests/auditor tests/deploy tests/docs tests/rocm
ALONE := tests/deploy/test_ray.py tests/deploy/test_tour.py
REST := $(ALONE) $(filter-out $(SIDE_BY_SIDE),$(patsubst %/,%,$(wildcard tests/*/))) $(wildcard tests/test_*.py)
test: setup  ## all that needs no GPU
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) --dist loadfile $(SIDE_BY_SIDE) $(ALONE:%=--ignore=%); \
	failed=$$?; $(BIN)/pytest $(REST) && exit $$failed

test-soak: setup  ## hundreds of kills, images built from nothing: what takes too long for every change
	$(BIN)/pytest -m soak

lint: setup  ## ruff, mypy --strict, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  ## speeds on this CPU, strict beside native
	$(BIN)/python -m tests.bench

# On a machine with an H100 or H200: GPU_PYTHON has torch for CUDA, Triton 3.6, pytest-xdist, cmake and nanobind.
# Two of them: the tree all-reduce and a model cut in two are tested and measured too.
GPU_PYTHON ?= python3
GPU_WORKERS ?= 8
gpu-build:  ## into GPU_PYTHON, on a machine with an H100 or H200
	$(GPU_PYTHON) -m pip install -q --no-build-isolation --no-deps -e .

test-gpu: gpu-build  ## what needs one GPU, and two where there are two
	$(GPU_PYTHON) -m pytest -q -n $(GPU_WORKERS) -k cuda tests/contracts/test_equal_bits.py tests/contracts/test_laws.py
	$(GPU_PYTHON) -m pytest -q -n $(GPU_WORKERS) --dist loadgroup --ignore-glob='*two_gpus.py' tests/gpu
	$(GPU_PYTHON) -m pytest -q tests/gpu/test_*two_gpus.py

bench-gpu: gpu-build  ## speeds of every op on this GPU
	$(GPU_PYTHON) -m tests.bench.gpu_bench --json docs/results/h200-bench.json

# What the tests in tests/deploy run. Debian packages need root.
ops-tools: setup  ## Prometheus, Alertmanager, Chromium, Helm
	BIN=$(BIN) deploy/tools.sh

dashboards: setup  ## Grafana's JSON, written anew
	$(BIN)/python -m deploy.grafana.generate

tour: setup ops-tools  ## breaks a run on purpose, waits for the pager, leaves pictures
	$(BIN)/python -m deploy.tour.main

clean:  ## away with .venv and build/
	rm -rf build $(VENV)

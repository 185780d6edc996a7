# The two commands of the README are `make demo` and `make test`; both set everything up on a fresh clone.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
NUMERICS ?= strict

.PHONY: setup build demo test lint bench clean ops-tools dashboards tour
setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q -U pip
	$(BIN)/pip install -q scikit-build-core==1.1.2 nanobind==3.1.0 cmake ninja
	$(BIN)/pip install -q --no-build-isolation -e '.[cpu,auditor,dev,ops]'
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

build: setup
	mkdir -p build && flock build/.lock $(BIN)/pip install -q --no-build-isolation --no-deps -e .

demo: setup
	$(BIN)/python -m services.main --config deploy/configs/demo.yaml --numerics $(NUMERICS)

test: setup
	$(BIN)/pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m tests.bench

# Prometheus, Alertmanager, Chromium, Helm: what the tests in tests/deploy run. Debian packages need root.
ops-tools: setup
	BIN=$(BIN) deploy/tools.sh

dashboards: setup
	$(BIN)/python -m deploy.grafana.generate

tour: setup ops-tools
	$(BIN)/python -m deploy.tour.main

clean:
	rm -rf build $(VENV)

# Everything a newcomer needs: each target sets up what it uses, then does its job.
#
#   make train              set up and run the main job    (ARGS="--model resnet20" adds options)
#   make test               set up, lint, type-check, test
#   make bench              set up and run the benchmark   (BENCH=unequal)

PYTHON ?= python3
VENV   ?= .venv
# The release CI tests with. On a machine without a GPU, naming it keeps pip from taking the CUDA
# build that an open range would bring; torch must be there before the package asks for "torch".
TORCH  ?= torch==2.13.0
BENCH  ?= unequal
PIP    := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: train test bench setup setup-dev lint format proto clean

train: setup
	$(VENV)/bin/convoy train examples/unequal.toml $(ARGS)

bench: setup
	$(VENV)/bin/convoy bench $(BENCH) $(ARGS)

test: lint
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal $(ARGS)

lint: setup-dev
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/codespell

format: setup-dev
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# The messages between lead and nodes, from their description.
proto: setup-dev
	$(VENV)/bin/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/convoy/launch/*.proto src/convoy/launch/parameters/*.proto

setup: $(VENV)/.ready
setup-dev: $(VENV)/.ready-dev

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Convoy needs Python 3.11 or newer: make PYTHON=python3.12 ..."; exit 3; }
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: | $(VENV)/.venv
	@echo "installing $(TORCH)"
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.ready: pyproject.toml constraints.txt | $(VENV)/.torch
	@echo "installing convoy"
	@$(PIP) --editable .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "installing the development tools"
	@$(PIP) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

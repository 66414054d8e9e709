# `make quickstart` and `make test` do everything on a fresh machine; PYTHON picks the interpreter of the new venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VENV_DOCS ?= .venv-docs

.PHONY: quickstart test test-faults lint bench reproduce docs

quickstart: $(VENV)/installed
	$(BIN)/python launch.py --config=experiments/quickstart.py --workdir=runs/quickstart

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

# Real processes that are killed, or several that train one run.
test-faults: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m faults

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.train_step
	$(BIN)/python -m benchmarks.recipe_step
	$(BIN)/python -m benchmarks.likelihood
	$(BIN)/python -m benchmarks.augment_step
	$(BIN)/python -m benchmarks.pixel_sampling
	$(BIN)/python -m benchmarks.scale

# The paper's tables, cell by cell, for hours; ARGS="--cells='mnist_vae_*' --jobs=2", or --dry_run to see the list.
reproduce: $(VENV)/installed
	$(BIN)/python -m exvae.reproduce $(ARGS)

# The site, in site/. The sources are only read, so that the packages of requirements.txt need not be installed.
docs: $(VENV_DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict

$(VENV)/installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet -r requirements-dev.txt
	touch $@

$(VENV_DOCS)/installed: requirements-docs.txt
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install --quiet -r requirements-docs.txt
	touch $@

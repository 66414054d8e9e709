# `make quickstart` and `make test` also install what they need. PYTHON is the interpreter for the new environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VENV_DOCS ?= .venv-docs

.PHONY: quickstart test test-faults lint bench reproduce docs

quickstart: $(VENV)/installed
	$(BIN)/python launch.py --config=experiments/quickstart.py --workdir=runs/quickstart

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

# The tests that kill real processes, or train one run with several processes.
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
	$(BIN)/python -m benchmarks.conv
	$(BIN)/python -m benchmarks.profile
	$(BIN)/python -m benchmarks.validation
	$(BIN)/python -m benchmarks.start

# The paper's tables, cell by cell: this takes hours. Options: ARGS="--cells='mnist_vae_*' --jobs=2"; --dry_run lists.
reproduce: $(VENV)/installed
	$(BIN)/python -m exvae.reproduce $(ARGS)

# The documentation, in site/. The sources are read but not imported, so requirements.txt is not needed.
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

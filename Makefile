# `make demo` shows it working, `make test` proves it. Both set everything up first, in .venv.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.setup
NATIVE := src/dsec/_native
PYTEST_ARGS ?=

.PHONY: setup programs check test clean

setup: $(STAMPS)/packages $(STAMPS)/project programs

$(STAMPS)/venv: scripts/python3.sh $(STAMPS)/packages
	test -x $(BIN)/python || "$$(scripts/python3.sh)" -m venv $(VENV)
	touch $@

# Before the virtual environment: it may bring the Python that makes it.
$(STAMPS)/packages: scripts/debian-packages.txt scripts/debian_packages.sh
	scripts/debian_packages.sh
	mkdir -p $(@D)
	touch $@

$(STAMPS)/project: pyproject.toml native/hatch_build.py $(STAMPS)/venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,inspect]'
	touch $@

# After a change in native/ only: the editable install has put the first build in place.
programs: $(STAMPS)/project
	$(MAKE) --quiet -C native
	mkdir -p $(NATIVE)
	for program in init spawner; do \
	  cmp --quiet native/build/$$program $(NATIVE)/$$program && continue; \
	  install -m 0755 native/build/$$program $(NATIVE)/.$$program.new && mv $(NATIVE)/.$$program.new $(NATIVE)/$$program; \
	done

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src scripts native/hatch_build.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_generated.py

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

clean:
	rm -rf dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache $(NATIVE) $(VENV)
	$(MAKE) -C native clean

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

.PHONY: setup programs bytecode demo check test v2 bench clean

setup: $(STAMPS)/dev programs bytecode

# First: it may bring the Python that makes the virtual environment.
$(STAMPS)/packages: scripts/debian-packages.txt scripts/debian_packages.sh
	scripts/debian_packages.sh
	mkdir -p $(@D)
	touch $@

$(STAMPS)/venv: $(STAMPS)/packages scripts/python3.sh
	test -x $(BIN)/python || "$$(scripts/python3.sh)" -m venv $(VENV)
	touch $@

$(STAMPS)/project: $(STAMPS)/venv pyproject.toml native/hatch_build.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	touch $@

$(STAMPS)/dev: $(STAMPS)/project
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

# The editable install put the first build in place; this follows later changes in native/.
programs: $(STAMPS)/project
	@$(MAKE) --quiet -C native
	@mkdir -p $(NATIVE); \
	for program in init spawner; do \
	  cmp --silent native/build/$$program $(NATIVE)/$$program && continue; \
	  install -m 0755 native/build/$$program $(NATIVE)/.$$program.new; \
	  mv $(NATIVE)/.$$program.new $(NATIVE)/$$program; \
	done

# Where Python may not write what it compiled (PYTHONDONTWRITEBYTECODE), every command of ours would compile all of it again.
bytecode: $(STAMPS)/project
	@$(BIN)/python -m compileall -q src

# Every level that this machine can have, at work and under attack.
demo: programs bytecode
	$(BIN)/python examples/demo.py

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy src scripts native/hatch_build.py
	$(BIN)/lint-imports --no-cache
	$(BIN)/python scripts/check_generated.py

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Control groups of version 2 alone, on another kernel, in an emulated machine (as root; docs/how-to/cgroup-v2.md).
v2: setup
	nice -n 10 $(BIN)/python scripts/v2_guest.py

# Every claim of speed, measured on this machine (as root, half an hour), and the page of figures made of it.
BENCHMARKS := lifecycle_container lifecycle_process exec pause_resume pool snapshots templates bases sustained transfer held \
              served journal_share burst environments
RESULTS := benchmarks/results

bench: setup
	for name in $(BENCHMARKS); do \
	  $(BIN)/python -m benchmarks.$$name --json $(RESULTS)/$$name.json; \
	done
	$(BIN)/python -m benchmarks.held --n 5000 --json $(RESULTS)/held_5000.json
	$(BIN)/python -m benchmarks.report

# A server that dies again and again while many ask it for everything (as root, ten minutes; docs/how-to/soak.md), and the page of what it came to.
SOAK_ARGS ?=

soak: setup
	status=0; nice -n 5 $(BIN)/python -m benchmarks.soak $(SOAK_ARGS) || status=$$?; \
	$(BIN)/python scripts/soak_reference.py; exit $$status

clean:
	rm -rf dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache $(NATIVE) $(VENV)
	$(MAKE) -C native clean

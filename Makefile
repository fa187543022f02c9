# Every target does its own set-up: `make demo` and `make test` are all that a fresh clone needs.
# PYTHON=... chooses the interpreter of a new .venv; ARGS=... goes to the program that a target ends in;
# WORKERS=... says in how many processes tests run.

SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
WORKERS ?= 2
IMAGE ?= polar-gym
SOURCES := polar_gym tests benchmarks docs

.DEFAULT_GOAL := help
.PHONY: help demo test test-e2e show-fuzz show-errors show-rewrites show-attacks show-matrix show-sandboxes show-pypi-tasks show-sft show-splice bench bench-peers show-nemo show-faults show-load show-utilisation show-ray vllm nemo lint format image clean core dev

help: ## Say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: ## Roll out a few sessions of real harnesses on this machine, without a GPU
	@.ci/needs demo
	@$(MAKE) --no-print-directory core
	$(BIN)/polar-gym rollout demo $(ARGS)

test: ## Run every test; what this machine lacks is skipped and named (with CI=true: fails)
	@.ci/needs test
	@$(MAKE) --no-print-directory $(if $(CI),vllm nemo,dev)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(ARGS)
	$(if $(ARGS),,$(BIN)/python -m tests.e2e.vllm_server pytest tests/unit --ignore=tests/unit/setup/test_setup.py -q)

test-e2e: ## Run only the tests with real harnesses, sandboxes and engines
	@.ci/needs test
	@$(MAKE) --no-print-directory $(if $(CI),vllm nemo,dev)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/e2e tests/wire $(ARGS)

show-fuzz: ## Try other random inputs in every property test, and keep what fails as an example (5 min; ARGS=--quick)
	@.ci/needs test
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.fuzz $(ARGS)

show-errors: ## Run every harness against an engine that fails, and show what each does (10 min; ARGS=--help)
	@.ci/needs demo
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.errors $(ARGS)

show-rewrites: ## Run every harness on answers that are hard to hand back, and show what each makes of them (2 min)
	@.ci/needs demo
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.rewrites $(ARGS)

show-matrix: ## Run every harness in every runtime on a bundled task, and show rewards and seconds (4 min)
	@.ci/needs test
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.matrix $(ARGS)

show-sandboxes: ## Start and stop 200 sandboxes of each runtime, kill some gateways, and show what is left (3 min)
	@.ci/needs test
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.sandboxes $(ARGS)

show-pypi-tasks: ## Make ten real tasks out of package releases, grade them in two runtimes and by swebench (10 min)
	@.ci/needs test
	@.ci/venv dev,swe
	$(BIN)/python -m tests.show.pypi_tasks $(ARGS)

show-sft: ## Roll out bundled and real tasks, export SFT data, load it and hold its ids against the captured ones (10 min)
	@.ci/needs test
	@.ci/venv dev,swe
	$(BIN)/python -m tests.show.sft $(ARGS)

show-attacks: ## Try to be rewarded for nothing, in every way we know, and show what stopped it (5 min)
	@.ci/needs demo
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.attacks $(ARGS)

show-faults: ## Run 200 sessions while every process of the service is killed at random (5 min; ARGS="--nodes 3")
	@.ci/needs demo
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.faults $(ARGS)

show-load: ## Run 500 sessions at once on one node, then 100 heavier ones: memory, latency, errors (8 min)
	@.ci/needs demo
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.load $(ARGS)

show-utilisation: ## Show how busy the places to run are: staged pools against one pool for everything (3 min)
	@.ci/needs demo
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.utilisation $(ARGS)

show-ray: ## Lose one of three machines of a Ray cluster while sessions run on it, and show where they end (1 min)
	@.ci/needs demo
	@$(MAKE) --no-print-directory dev
	$(BIN)/python -m tests.show.ray $(ARGS)

show-splice: vllm ## Prove token-in/token-out on a real vLLM: many random sessions, with splicing and without (10 min)
	$(BIN)/python -m tests.show.splice $(or $(ARGS),200)

show-nemo: vllm nemo ## Run NeMo Gym 0.4 and 0.7 on a real vLLM: what reaches a trainer, and what failures look like (10 min)
	$(BIN)/python -m tests.show.nemo $(ARGS)

bench: dev ## Measure every performance claim on this machine, and write build/bench/report.md (15 min; ARGS=--help)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: dev ## Install other gateways for `make bench` to measure too: once per machine, 3 GB, outside the checkout
	$(BIN)/python -m benchmarks.peers

vllm: dev ## Install the CPU build of vLLM that tests use: once per machine, 3.5 GB, outside the checkout
	PIP_QUIET=1 $(BIN)/python -m tests.e2e.vllm_server install

nemo: dev ## Install the NeMo Gym versions that tests use: once per machine, 3 GB, outside the checkout
	PIP_QUIET=1 $(BIN)/python -m tests.e2e.nemo_gym install

lint: dev ## Check format, style, types, and the imports between rooms
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter

format: dev ## Format the code
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

image: ## Build the gateway's container image; it trusts what this machine trusts
	mkdir -p build/ca-certificates
	cp /usr/local/share/ca-certificates/*.crt build/ca-certificates/ 2>/dev/null || true
	docker build --tag $(IMAGE) $(ARGS) .

clean: ## Remove what was made in the checkout; the caches outside it stay
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

core dev:
	@.ci/venv $@

# Every target does its own set-up: `./demo` and `./test` are the same without make.
# PYTHON=... chooses the interpreter of a new .venv; ARGS=... goes to the program that a target ends in;
# WORKERS=... says in how many processes tests run.

SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
WORKERS ?= 3
IMAGE ?= polar-gym
SOURCES := polar_gym tests benchmarks docs recipes

SHOWS := show-affinity show-attacks show-bare show-branch show-errors show-exact show-faults show-fleet show-forest show-fuzz show-gym show-harbor show-harness-check \
	show-honest show-law show-learning show-load show-matrix show-nemo show-nemo-rl show-pypi-tasks show-ray \
	show-remote show-resume show-rewrites show-sandboxes show-search show-sft show-slurm show-splice show-swe-ground show-tasks show-utilisation \
	show-view

.DEFAULT_GOAL := help
.PHONY: help demo test test-e2e lint format docs $(SHOWS) bench bench-peers vllm nemo nemo-rl image clean core dev dev,swe

help: ## List the targets
	@awk -F ':.*## ' '/^##@ / { print "\n" substr($$0, 5) } \
		/^[a-z][a-z0-9-]*:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ First run

demo: ## Roll out sessions of real harnesses on this machine, without a GPU
	@./demo $(ARGS)

##@ Develop

test: ## Run the tests (ARGS=--all: slow ones too); in CI a missing part fails
	@./test $(ARGS)

test-e2e: ## Run only the tests with real harnesses, sandboxes and engines
	@.ci/inside .ci/needs test
	@$(MAKE) --no-print-directory $(if $(CI),vllm nemo,dev)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile tests/e2e tests/wire $(ARGS)

lint: dev ## Check format, style, types and the imports between rooms
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo --cache-dir build/import-linter

format: dev ## Format the code
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: dev ## Build the documentation as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

##@ Show (all take ARGS=--quick, ARGS=--help; see tests/show/README.md)

show-affinity: ## Run sessions on four vLLM servers, and kill one of them (10 min)
show-attacks: ## Try to get rewards without solving the task (55 min)
show-bare: ## Type ./demo and ./test on bare Debian and Ubuntu, as root and user
show-branch: ## Branch an episode of every harness at each turn, on a real vLLM (15 min)
show-errors: ## Run every harness against an engine that fails (10 min)
show-exact: ## Audit the books of sessions with a recorder and a real vLLM (40 min)
show-faults: ## Kill every process of the service while 200 sessions run, twice (10 min)
show-fleet: ## Run the service with a thousand nodes on a virtual clock (1 h)
show-forest: ## Count what groups of sessions of each harness share as prefixes (15 min)
show-fuzz: ## Try other random inputs in every property test (5 min)
show-gym: ## Run harnesses on NeMo Gym's own environments, and compare rewards (40 min)
show-harbor: ## Grade task directories of Harbor: ARGS="--directories DIR..." (5 min)
show-harness-check: ## Check what holds between the gateway and each harness (15 min)
show-honest: ## Count correct solutions without the reward, and lost sessions (65 min)
show-law: ## Pack sessions in several ways, and compare trainers' gradients (1 min)
show-learning: ## Train through real harnesses until held-out tasks are solved (6 h)
show-load: ## Run 500 sessions at once on one node, then 100 heavier ones (8 min)
show-matrix: ## Run every harness in every runtime on a bundled task (4 min)
show-nemo: ## Run NeMo Gym 0.4 and 0.7 on a real vLLM (10 min)
show-nemo-rl: ## Train real sessions by NeMo RL: NEMO_RL=DIRECTORY, its checkout (7 min)
show-pypi-tasks: ## Make ten real tasks out of package releases, and grade them (10 min)
show-ray: ## Lose one of three machines of a Ray cluster while sessions run (1 min)
show-remote: ## Run harnesses in sandboxes of NeMo Gym's providers and over SSH (20 min)
show-resume: ## Kill runs of every harness in each of their calls, and resume them (1 h)
show-rewrites: ## Give every harness answers that are hard to hand back (2 min)
show-sandboxes: ## Start and stop 200 sandboxes of each runtime, and kill gateways (3 min)
show-search: ## Search for combinations of attacks that are rewarded (60 min)
show-sft: ## Export SFT data, and compare its ids with the captured ones (10 min)
show-slurm: ## Run the recipe of Slurm on a one-machine Slurm that pre-empts it (3 min)
show-splice: ## Prove token-in/token-out on a real vLLM, with and without it (10 min)
show-swe-ground: ## Grade rebuilt SWE-bench tasks by us and by swebench (2 h)
show-tasks: ## Make tasks out of git histories: ARGS="--histories DIR..." (1 h)
show-utilisation: ## Compare staged pools with one pool for everything (3 min)
show-view: ## Open pages of 2 and 10 million tokens in a browser (3 min)

show-fuzz show-harbor show-honest show-matrix show-sandboxes show-pypi-tasks show-sft show-swe-ground show-tasks show-view: NEEDS := test
show-splice show-nemo: NEEDS := python
show-honest show-pypi-tasks show-sft show-swe-ground show-tasks: PARTS := dev,swe
show-affinity show-branch show-exact show-law show-learning show-nemo-rl show-splice: PARTS := vllm
show-gym show-remote: PARTS := nemo
show-nemo: PARTS := vllm nemo

$(SHOWS): show-%:
	@.ci/inside .ci/needs $(or $(NEEDS),demo)
	@$(MAKE) --no-print-directory $(or $(PARTS),dev)
	$(BIN)/python -m tests.show.$(subst -,_,$*) $(ARGS)

##@ Bench

bench: dev ## Measure every performance claim, and write build/bench/report.md (15 min)
	$(BIN)/python -m pip install -qq --disable-pip-version-check --editable '.[bench]'
	$(BIN)/python -m benchmarks $(ARGS)

bench-peers: dev ## Install other gateways that `make bench` measures too (once, 3 GB)
	$(BIN)/python -m benchmarks.peers

##@ House-keeping (what is installed once per machine lies outside of the checkout)

vllm: dev ## Install the CPU build of vLLM that tests use (once, 3.5 GB)
	PIP_QUIET=1 $(BIN)/python -m tests.e2e.vllm_server install

nemo: dev ## Install the NeMo Gym versions that tests use (once, 3 GB)
	PIP_QUIET=1 $(BIN)/python -m tests.e2e.nemo_gym install

nemo-rl: vllm ## Test with NeMo RL's real code: NEMO_RL=DIRECTORY, a checkout of it (4 min)
	PIP_QUIET=1 $(BIN)/python -m tests.nemo_rl.environment "$(NEMO_RL)" $(ARGS)

image: ## Build the gateway's container image, which trusts what this machine trusts
	mkdir -p build/ca-certificates
	cp /usr/local/share/ca-certificates/*.crt build/ca-certificates/ 2>/dev/null || true
	docker build --tag $(IMAGE) $(ARGS) .

clean: ## Remove what was made in the checkout; caches outside of it stay
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -prune -exec rm -rf {} +

core dev dev,swe:
	@.ci/venv $@

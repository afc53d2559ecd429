# Two commands do everything: `make quickstart` and `make test`.
# Tests that run side by side, each with engines of its own: for two cores. `make test TESTS_AT_ONCE=4` on more.
TESTS_AT_ONCE ?= 2
# quick: every unit test and one real case of everything; full: all; 0 to 11: quick and that twelfth of the others;
# cluster: more runs on several nodes; servers: engines as servers, and foreign clients; service: the queue under kills.
TESTS ?= quick
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do $$p -c "" 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
INSTALLED := .venv/.installed-cpu

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-full test-cluster test-servers test-service coverage check format release clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(INSTALLED) ## install everything into .venv (CPU)

$(INSTALLED): pyproject.toml scripts/install.py $(wildcard constraints/cpu*.txt)
	$(PYTHON) scripts/install.py
	@touch $@

quickstart: $(INSTALLED) ## train a small model with SFT, then GRPO, on this CPU, and show what it learned
	$(BIN)/python examples/quickstart/run.py

test: $(INSTALLED) ## the tests to run before a commit: all units and one real case of everything, with real vLLM
	@$(PYTHON) scripts/install.py --for-tests
	$(BIN)/pytest --tests $(TESTS) --numprocesses $(TESTS_AT_ONCE) --dist loadfile --no-loadscope-reorder

test-full: ## all tests
	@$(MAKE) --no-print-directory test TESTS=full

test-cluster: ## the tests of runs on several nodes, by Slurm and by Ray
	@$(MAKE) --no-print-directory test TESTS=cluster TESTS_AT_ONCE=1

test-servers: ## the tests of engines as servers, and of foreign clients
	@$(MAKE) --no-print-directory test TESTS=servers TESTS_AT_ONCE=1

test-service: ## the tests of the queue and its service, with many kills
	@$(MAKE) --no-print-directory test TESTS=service TESTS_AT_ONCE=1

coverage: $(INSTALLED) ## lines and branches that the tests run, in every process; `make coverage TESTS=quick`
	rm -rf .coverage && mkdir .coverage
	COVERAGE_PROCESS_START=$(CURDIR)/pyproject.toml SLIPSTREAM_COVERAGE=$(CURDIR)/.coverage \
		$(MAKE) --no-print-directory test TESTS=$(if $(filter command line,$(origin TESTS)),$(TESTS),full)
	SLIPSTREAM_COVERAGE=$(CURDIR)/.coverage $(BIN)/coverage combine --quiet
	SLIPSTREAM_COVERAGE=$(CURDIR)/.coverage $(BIN)/coverage report

check: $(INSTALLED) ## lint, format, types and prose
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python dev/prose.py

format: $(INSTALLED) ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

release: $(INSTALLED) ## set the version, commit and tag: `make release VERSION=0.2.0`
	$(BIN)/python dev/release.py "$(VERSION)"

clean: ## remove runs, models and caches; keep the environment
	rm -rf runs models .pytest_cache .ruff_cache .hypothesis

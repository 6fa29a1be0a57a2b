# make benchmark: set up and run the main benchmark.  make test: set up and run the tests.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: benchmark test lint setup

benchmark: $(STAMP)
	$(BIN)/python -m benchmarks run accuracy_vs_nfe

test: $(STAMP) lint
	$(BIN)/python -m pytest -n auto --dist worksteal

lint: $(STAMP)
	$(BIN)/python -m ruff check .

setup: $(STAMP)

# constraints.txt pins the versions that the tests ran on.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,bench]'
	touch $(STAMP)

# Two commands do everything: `make demo` and `make test`. Both create .venv and install into it when needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow lint format docs bench study clean

.venv/installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@

demo: .venv/installed
	$(BIN)/vitfocus demo --out runs/demo

test: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# Sweeps that take longer than a test run should: every timm model at full depth, and other long checks.
test-slow: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m slow

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The theme announces its successor on every build; that is no warning about these pages.
docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "documentation: site/index.html"

bench: .venv/installed
	for script in benchmarks/[a-z]*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

# The CIFAR-100 study, what is unfinished of it; for example: make study DATA=/data/cifar100 STUDY="--workers 4"
DATA ?= data/cifar100
study: .venv/installed
	$(BIN)/python studies/cifar100/study.py --data $(DATA) $(STUDY)

clean:
	rm -rf .venv build dist runs site src/*.egg-info

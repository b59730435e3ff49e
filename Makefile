# Two commands do everything: `make demo` and `make test`. Both create .venv and install into it when needed.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-slow test-adversarial test-lowest lint format docs bench study install-locked lock audit clean

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

# All attacks with a seed, as a table of what was tried, held and failed; for example: make test-adversarial SEED=7 TRIES=2000
SEED ?= 0
TRIES ?= 20000
test-adversarial: .venv/installed
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m adversarial --seed $(SEED) --tries $(TRIES) $(ATTACKS)

# The lowest version of every dependency that pyproject.toml allows, in a virtual environment of its own (6 GB); the newest
# are what `make test` installs. LOWEST_TESTS is a selection that uses every dependency.
LOWEST ?= .venv-lowest
LOWEST_TESTS ?= tests/anatomy tests/attention tests/core tests/data tests/kernels tests/models \
  tests/report/test_report.py tests/report/test_serve.py tests/robustness tests/tasks tests/train/test_trainer.py \
  tests/train/test_checkpoint.py tests/train/test_compile.py tests/train/test_optimiser.py tests/treatments src/vitfocus
test-lowest: .venv-tools/installed
	.venv-tools/bin/uv venv --allow-existing --quiet --python $(PYTHON) $(LOWEST)
	.venv-tools/bin/uv pip install --quiet --python $(LOWEST)/bin/python --resolution lowest-direct --editable ".[dev]"
	$(LOWEST)/bin/python .ci/lowest.py
	OMP_NUM_THREADS=1 $(LOWEST)/bin/python -m pytest -n 2 --dist worksteal $(LOWEST_TESTS)

# Tools that look at the dependencies, apart from them.
.venv-tools/installed:
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/pip install --quiet --upgrade pip uv pip-audit
	touch $@

# Exact versions with hashes of everything that `.[dev]` installs, for Python 3.11 and newer on every platform.
lock: .venv-tools/installed
	.venv-tools/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --all-extras --generate-hashes \
	  --no-annotate --no-header --no-emit-index-url --no-emit-find-links --output-file .ci/requirements.txt pyproject.toml

# The locked versions instead of the newest. What pyproject.toml has gained since `make lock` is added by the second line.
install-locked:
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes --requirement .ci/requirements.txt
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch .venv/installed

audit: .venv-tools/installed
	.ci/audit .venv-tools/bin/pip-audit

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
	rm -rf .venv .venv-lowest .venv-tools build dist runs site src/*.egg-info

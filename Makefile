# Everything runs in .venv, through relative paths only, so that the checkout may lie anywhere.
# An existing .venv is reused; pyproject.toml newer than the stamp installs into it again.

PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo lint format test test-full clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 20

venv: $(STAMP) ## Create .venv (or reuse it) and install the package with its development tools

# Only the existence of the interpreter counts (order-only): its date is that of the system's Python.
$(STAMP): pyproject.toml | $(PY)
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PY) -m ensurepip --upgrade
	$(PY) -m pip install --no-input 'pip>=22'
	$(PY) -m pip install --no-input -e '.[dev]'
	@touch $(STAMP)

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed; try: make PYTHON=python3.12" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv

demo: $(STAMP) ## Train the example under SDP and under DDP, and compare
	$(PY) -m examples.image_classification.demo

lint: $(STAMP) ## Check style, types and spelling
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m codespell_lib .

format: $(STAMP) ## Format the code and apply safe fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: lint ## Lint, then the fast tests
	$(PY) -m pytest -m "not slow and not gpu"

test-full: lint ## Lint, then every test that needs no accelerator
	$(PY) -m pytest -m "not gpu"

clean: ## Remove caches and build output (keeps .venv)
	rm -rf build dist site htmlcov .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .venv -prune -o -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +

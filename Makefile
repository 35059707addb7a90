# `make demo` and `make test` need nothing but Python 3.11+ (and, to draw, OpenGL: installed if it can be).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

.PHONY: demo test oldest uncompiled parity faults stress soak gymnasium-suite lint types bench docs opengl opengl-all clean

# a stamp a set of extras, so that nothing is installed twice
$(VENV)/.base: pyproject.toml $(wildcard aioenv/speedups/*.[ch])
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --editable '.[video]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

$(VENV)/.suite: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[suite]'
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[bench]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

opengl: $(VENV)/.base
	@sh scripts/opengl.sh $(BIN)/python

# both of Mesa's, EGL and OSMesa, which the tests compare
opengl-all: $(VENV)/.base
	@sh scripts/opengl.sh $(BIN)/python all

demo: $(VENV)/.base opengl
	$(BIN)/aioenv demo $(ARGS)

test: $(VENV)/.dev opengl-all
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --durations=30 \
		-m 'not parity and not faults and not stress and not soak' $(ARGS)

# the same on the oldest libraries that pyproject.toml allows
oldest:
	$(PYTHON) scripts/oldest.py > .oldest.txt
	$(MAKE) test VENV=.venv-oldest PIP_ARGS='--constraint .oldest.txt'

# the same in Python alone
uncompiled:
	AIOENV_NO_SPEEDUPS=1 $(MAKE) test

# every env x autoreset mode x number of workers x event loop against Gymnasium's SyncVectorEnv
parity: $(VENV)/.dev opengl-all
	$(BIN)/python -m pytest -m parity $(ARGS)

# every fault x moment x way to start x event loop x async or blocking, as a table
faults: $(VENV)/.dev opengl-all
	$(BIN)/python -m pytest -q -m faults $(ARGS)

stress: $(VENV)/.dev opengl-all
	$(BIN)/python -m pytest -m stress $(ARGS)

# a million env-steps, a worker killed every second
soak: $(VENV)/.dev opengl-all
	$(BIN)/python -m pytest -m soak -p no:logging -o faulthandler_timeout=0 $(ARGS)

# Gymnasium's own tests, on the drop-in; from a checkout of its repository: make gymnasium-suite ARGS="--source PATH"
gymnasium-suite: $(VENV)/.suite opengl-all
	$(BIN)/python scripts/gymnasium_suite.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/aioenv bench $(ARGS)

docs: $(VENV)/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build aioenv/speedups/*.so .venv-oldest .oldest.txt .mypy_cache .pytest_cache .ruff_cache site

# `make demo` and `make test` need nothing but Python 3.11+ (and, to draw, OpenGL: installed if it can be).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)

QUICK := 'not parity and not faults and not stress and not soak and not ecosystem and not cluster'
# what depends on the version of Python: starting workers, code of scripts, C, asyncio's loops
SAMPLE := tests/contract $(addprefix tests/,definitions/test_definitions.py definitions/test_script_code_kinds.py native/test_native.py \
	process/test_closed_loops.py process/test_forkserver.py process/test_workers.py programs/test_first_hour.py rendering/test_rendering.py \
	rollout/test_rollout.py spaces/test_wrapped_steps.py speedups/test_speedups.py sync/test_drop_in.py sync/test_sync.py vector_env/test_vector_env.py)

.PHONY: demo demo-cluster test oldest uncompiled parity faults stress soak ecosystem adapters trainers watch cluster cluster-faults examples curves second-python gymnasium-suite lint types bench docs docs-browser dist opengl opengl-all clean

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

# torch: one version, since each is a large download, and any will do
$(VENV)/.adapters: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[adapters]' 'torch==2.13.0'
	@touch $@

$(VENV)/.watch: $(VENV)/.dev
	$(PIP_INSTALL) --editable '.[watch]' playwright
	@touch $@

# the same environment holds torch and Ray
$(VENV)/.ray: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[ray]'
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[bench]'
	@touch $@

$(VENV)/.dist: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[dist]'
	@touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP_INSTALL) --editable '.[docs]'
	@touch $@

opengl: $(VENV)/.base
	@sh tests/tools/opengl.sh $(BIN)/python

# both of Mesa's, EGL and OSMesa, which the tests compare
opengl-all: $(VENV)/.base
	@sh tests/tools/opengl.sh $(BIN)/python all

demo: $(VENV)/.base opengl
	$(BIN)/aioenv demo $(ARGS)

# two nodes of a Ray on this machine, one of which is killed and replaced
demo-cluster: $(VENV)/.ray opengl
	$(BIN)/python examples/cluster/demo.py $(ARGS)

test: $(VENV)/.dev opengl-all
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --durations=30 \
		-m $(QUICK) $(ARGS)

# the same on the oldest libraries that pyproject.toml allows
oldest:
	$(PYTHON) tests/tools/oldest.py > .oldest.txt
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

# envs of other packages, each set of versions in a virtual environment of its own: make ecosystem ARGS="mujoco-3.3"
ecosystem: $(VENV)/.base opengl-all
	$(BIN)/python -m tests.ecosystem.run $(ARGS)

# the pages whose code needs libraries that `make test` does not install
NEED_TORCH := $(patsubst %,'tests/docs/test_pages.py::test_the_code_of_a_page_runs[%]',$(shell grep -l '^needs:.*torch' docs/*/*.md))
# the tests of the adapters, which `make test` skips where the other libraries are missing
adapters: $(VENV)/.adapters opengl-all
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m $(QUICK) \
		tests/adapters tests/examples/test_training.py tests/benchmarks/test_training.py tests/*/test_*first_hour.py tests/docs/test_reference.py $(NEED_TORCH) $(ARGS)

# PPO of each training library to its known return, as a table, also over the library's own vector env: about 15 minutes
trainers: $(VENV)/.adapters
	$(BIN)/python -W ignore -m tests.adapters.trainers $(ARGS)

TRAIN := $(BIN)/python examples/training
# the examples that learn, in small: half a minute
examples: $(VENV)/.adapters
	@mkdir -p build
	$(TRAIN)/ppo_torch.py --steps 66000 --save build/ppo.pt --log build/ppo.csv
	$(TRAIN)/curves.py build/ppo.csv --bar 0
	$(TRAIN)/evaluate_torch.py build/ppo.pt --episodes 10
	$(TRAIN)/pixels_ppo_torch.py --steps 10000
	$(TRAIN)/sac_torch.py --steps 8000
	$(TRAIN)/population.py --generations 3
	$(TRAIN)/curriculum.py --steps 20000
	$(TRAIN)/ray_ppo.py --local --env CartPole-v1 --num-envs 16 --steps 30000

# the same at full length, for the pictures of the documentation, five seeds each: about two hours on 2 cores
CURVES := docs/_static/examples/training
SEEDS ?= 0 1 2 3 4
curves: $(VENV)/.adapters
	@mkdir -p build $(CURVES)
	for s in $(SEEDS); do $(TRAIN)/ppo_torch.py --seed $$s --log build/ppo-$$s.csv --save build/ppo-$$s.pt || exit; done
	$(TRAIN)/curves.py $(SEEDS:%=build/ppo-%.csv) --title HalfCheetah-v5 --png $(CURVES)/ppo_torch.png
	$(TRAIN)/evaluate_torch.py build/ppo-$(firstword $(SEEDS)).pt --curve $(CURVES)/evaluate_torch.png
	for s in $(SEEDS); do $(TRAIN)/pixels_ppo_torch.py --seed $$s --log build/pixels-$$s.csv || exit; done
	$(TRAIN)/curves.py $(SEEDS:%=build/pixels-%.csv) --title 'InvertedPendulum-v5 from pixels' --png $(CURVES)/pixels_ppo_torch.png
	for s in $(SEEDS); do $(TRAIN)/sac_torch.py --until 1500 --seed $$s --log build/sac-$$s.csv || exit; done
	$(TRAIN)/curves.py $(SEEDS:%=build/sac-%.csv) --bar 1500 --title Hopper-v5 --png $(CURVES)/sac_torch.png
	$(TRAIN)/population.py --curve $(CURVES)/population.png
	$(TRAIN)/curriculum.py --curve $(CURVES)/curriculum.png
	$(TRAIN)/ray_ppo.py --local --log build/ray_ppo.csv
	$(TRAIN)/curves.py build/ray_ppo.csv --title HalfCheetah-v5 --png $(CURVES)/ray_ppo.png

# the page of a run in Chromium, which `make test` leaves out (Debian: apt-get install chromium); the picture of the docs:
# python -m tests.watching.picture
watch: $(VENV)/.watch opengl
	$(BIN)/python -m pytest tests/watching $(ARGS)

# workers that Ray places, on two simulated nodes, and a node that is killed; with the whole grid of envs and modes: make cluster ARGS="-m 'not stress'"
cluster: $(VENV)/.dev $(VENV)/.ray opengl-all
	$(BIN)/python -m pytest -n 2 --dist worksteal -m $(QUICK) tests/cluster/test_ray.py tests/cluster/test_demo.py $(ARGS)

# each of these faults 20 times, as a table
cluster-faults: $(VENV)/.dev $(VENV)/.ray opengl-all
	$(BIN)/python -m pytest -q -m 'not cluster' tests/cluster/test_faults.py tests/cluster/test_ray.py $(ARGS)

# a sample of the tests on another Python: make second-python PYTHON=python3.13 VENV=.venv-313
second-python: $(VENV)/.dev opengl-all
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m $(QUICK) $(SAMPLE) $(ARGS)

# Gymnasium's own tests, on the drop-in; from a checkout of its repository: make gymnasium-suite ARGS="--source PATH"
gymnasium-suite: $(VENV)/.suite opengl-all
	$(BIN)/python tests/tools/gymnasium_suite.py $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# every table of docs/data: make bench ARGS="--rows cartpole"; a user's own env is compared by `aioenv bench`
bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks $(ARGS)

# the sdist and the wheel, built and tested outside of the checkout: make dist ARGS="tests/contract -n 2"
dist: $(VENV)/.dist opengl-all
	$(BIN)/python tests/tools/dist.py $(ARGS)

# torch is for the tutorials that train, which are run here
docs: $(VENV)/.docs $(VENV)/.adapters opengl
	rm -rf docs/reference/generated build/docs
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs
	$(BIN)/python -m tests.docs.built

# each page in Chromium: width, contrast, errors (Debian: apt-get install chromium)
docs-browser: docs
	$(BIN)/python -m pip install --quiet playwright
	$(BIN)/python -m tests.docs.browser $(ARGS)

clean:
	rm -rf $(VENV) build aioenv/speedups/*.so .venv-oldest .venv-ecosystem .oldest.txt .mypy_cache .pytest_cache .ruff_cache site docs/examples docs/reference/generated

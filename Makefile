# Three commands for a newcomer: make demo, make check, make test. Each makes .venv by itself.
PYTHON ?= python3
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Programs start faster from compiled files: of packages those that are imported, when they first are. All of them would
# take a minute and a half more to install.
export PYTHONDONTWRITEBYTECODE =
# Test processes, each on one thread, and one more than processors, as some tests wait (quick ones do not). Our own code
# is compiled once before all. Runs write through to the disk, which is waited
# for: tests write into memory where there is room.
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)
TMP := $(shell [ "$$(df -k --output=avail /dev/shm 2> /dev/null | tail -1)" -gt 4000000 ] 2> /dev/null && echo TMPDIR=/dev/shm)
TEST = $(BIN)/python -m compileall -q src && OMP_NUM_THREADS=1 $(TMP) $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo lint check test quick whole test-all test-faults test-fuzz bench data docs lock
demo: .venv/ready
	$(BIN)/fedskew demo

# Style, imports (which package may know which), types, how large the house is, and whether the lists of mutants and of
# defences fit it.
lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python tools/size.py
	$(BIN)/python tools/mutants.py check
	$(BIN)/python tools/defences.py --check

# For the edit loop. Types are checked while the tests run.
check: .venv/ready
	$(MAKE) --no-print-directory -j2 lint quick

test: .venv/ready
	$(MAKE) --no-print-directory -j2 lint whole

quick: JOBS = $(shell getconf _NPROCESSORS_ONLN)
quick: data
	$(TEST) -m "not slow and not whole_product and not faults and not fuzz"

whole: data
	$(TEST)

# Also the whole product of methods, all components and recipes where make test has some, and the papers' largest
# networks: half an hour more.
test-all: test
	$(BIN)/python -m pytest -m whole_product

# Real processes that fail, are killed or stopped: federations, the ranks of torchrun, sweeps, clusters: some minutes more.
# Each starts several processes, which import PyTorch; what they show of our own code is in make test without processes.
test-faults: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m faults tests

# Tables, configs and run folders that are changed at random, by seeds, and random replies of sites: a few minutes.
# FUZZ=500 has more run folders, and 500 replies for each property instead of 1,000.
test-fuzz: .venv/ready
	$(TEST) -m fuzz tests/fuzz
	FUZZ=$${FUZZ:-1000} $(TEST) tests/deploy/test_replies.py

bench: .venv/ready data
	$(BIN)/python benchmarks/round_loop.py
	$(BIN)/python benchmarks/local_training.py
	$(BIN)/python benchmarks/solver.py

# The documentation, into site/; needs no network. To search in it: python -m http.server -d site
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The real data sets, in their authors' file formats, where ../shared/data is there.
data: .venv/ready
	@if [ -z "$$FEDSKEW_DATA" ] && [ -f ../shared/data/unpack.py ] && [ ! -f .data/ready ]; then \
		$(BIN)/python ../shared/data/unpack.py .data && touch .data/ready; fi

# By two processes, without a look at what each needs, as all is pinned, but for what PyTorch's build for GPUs needs.
.venv/ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	xargs -P 2 -n 100 $(PIP) --no-compile --no-deps < requirements.lock
	$(BIN)/python -c "import torch" 2> /dev/null || $(PIP) --no-compile --requirement requirements.lock
	$(PIP) --no-deps --no-build-isolation --editable .
	touch .venv/ready

# Pins what is installed now: run it in an environment that passes the tests.
lock:
	$(BIN)/python -m pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//' > requirements.lock

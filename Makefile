# `make reproduce-amoebanet` and `make test` set themselves up: one virtual environment, made once. Runs go to runs/,
# which git ignores; `python -m reproduce publish NAME` copies one into results/measured, to be committed.
# Override where it lives and what it is made of:  make test VENV=/path/to/venv PYTHON=python3.12 TORCH='torch==2.13.*'
VENV ?= .venv
PYTHON ?= python3
TORCH ?=
INSTALL ?= $(BIN)/python -m pip install --disable-pip-version-check

BIN := $(VENV)/bin
READY := $(VENV)/.installed

.PHONY: help setup test test-oldest planted lint docs suites benchmark regression has-base has-sides reproduce reproduce-amoebanet reproduce-unet reproduce-resnet results compare report clean

help:
	@echo "make reproduce            run every experiment here, one model after another"
	@echo "make reproduce-amoebanet  run the AmoebaNet-D experiments here (ARGS='--scale small --steps 5')"
	@echo "make reproduce-unet       run the U-Net experiments here"
	@echo "make reproduce-resnet     run the ResNet-101 experiments here (DATA=folder of ImageNet)"
	@echo "                          (to continue after Ctrl-C: python -m reproduce run NAMES --resume)"
	@echo "make results              write anew all tables that are made from records"
	@echo "make compare A=… B=…      compare two sides: records, folders, runs by name, git revisions (ARGS='--metric speedup')"
	@echo "make report               write results/report.html, a page of everything in results/ and runs/"
	@echo "make test                 run the tests"
	@echo "make test-oldest          run them with the oldest versions that setup.cfg allows"
	@echo "make planted              plant each fault of tests/planted in a copy, and see whether tests find it (ARGS='--jobs 2')"
	@echo "make lint                 ruff (its format, too), mypy, and whether pages are as records and code say"
	@echo "make docs                 build the site of these docs in build/docs; a broken link is an error"
	@echo "make benchmark            time the balancer, the planner and the replay"
	@echo "make suites               run each of these once, untimed, to see that they work"
	@echo "                          what a GPU can tell in minutes: $(BIN)/python -m benchmarks.gpu --out DIR"
	@echo "make regression BASE=REV  is the working tree worse than that revision, by counts, overlap or time?"
	@echo "                          what a step does, by count: $(BIN)/python -m benchmarks.gates.counts"
	@echo "                          do tasks still run at once: $(BIN)/python -m benchmarks.gates.meeting"
	@echo "                          what a task costs beside it: $(BIN)/python -m benchmarks.gates.machinery --base REV"
	@echo "make clean                remove the virtual environment and caches"

setup: $(READY)

$(READY): setup.cfg pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, $(PYTHON) is " + sys.version.split()[0])'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --quiet --editable '.[test]' $(TORCH)
	@touch $@

# One process more than there are cores, since some tests wait, but at most 4: tests over ranks have 4 processes each.
# Python keeps what it has compiled, also where the environment says that it should not: tests start many Pythons.
test: $(READY)
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 4 --dist worksteal $(ARGS)

# pip has no way to choose the oldest versions.
OLDEST = $(VENV)-oldest/bin/python
test-oldest:
	@$(MAKE) --no-print-directory test VENV='$(VENV)-oldest' \
	    INSTALL='$(OLDEST) -m pip install --quiet uv && $(OLDEST) -m uv pip install --python $(OLDEST) --resolution lowest-direct'

planted: $(READY)
	@$(BIN)/python -m tests.planted $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/python -m benchmarks.render --check
	$(BIN)/python -m benchmarks.names

docs: $(READY)
	$(INSTALL) --quiet --editable '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -n -q docs build/docs

suites: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-disable $(ARGS)

benchmark: $(READY)
	$(BIN)/python -m pytest benchmarks --benchmark-enable --benchmark-only $(ARGS)

# What is missing is told before anything is installed.
has-base:
	@: $(if $(BASE),,$(error make regression BASE=...: BASE is missing, a git revision such as main))

regression: has-base $(READY)
	@$(BIN)/python -m reproduce regression --base '$(BASE)' $(ARGS)

reproduce-amoebanet: $(READY)
	$(BIN)/python -m reproduce run amoebanet-speed amoebanet-memory $(ARGS)
	$(BIN)/python -m reproduce show results/predicted/amoebanet-speed-p40x8.json results/predicted/amoebanet-memory-p40x8.json

reproduce-unet: $(READY)
	$(BIN)/python -m reproduce run unet-speed unet-memory unet-ablation $(ARGS)

reproduce-resnet: $(READY)
	$(BIN)/python -m reproduce run resnet101-speed $(ARGS)
	$(BIN)/python -m reproduce run resnet101-accuracy $(if $(DATA),--data '$(DATA)') $(ARGS)

reproduce: reproduce-amoebanet reproduce-unet reproduce-resnet

results: $(READY)
	$(BIN)/python -m benchmarks.render

has-sides:
	@: $(if $(A),,$(error make compare A=... B=...: A is missing)) $(if $(B),,$(error make compare A=... B=...: B is missing))

compare: has-sides $(READY)
	@$(BIN)/python -m reproduce compare '$(A)' '$(B)' $(if $(C),'$(C)') $(ARGS)

report: $(READY)
	$(BIN)/python -m reproduce report --out results/report.html $(ARGS)

# One experiment at a time, also under make -j: they would disturb each other's times.
.NOTPARALLEL:

clean:
	rm -rf $(VENV) $(VENV)-oldest build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks *.egg-info

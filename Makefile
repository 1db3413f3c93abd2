# `make` lists the targets. Each creates what it needs: a virtual environment in .venv (.venv-oldest for
# test-oldest) and an editable install at the versions of the constraints file. A second run installs
# nothing, unless pyproject.toml or the constraints changed.
#
# Variables:
#   PYTHON       the interpreter that makes the environments, 3.11 or newer   make test PYTHON=python3.12
#   WORKERS      test processes, `auto` for one a core (8 at most)            make test WORKERS=1
#   PYTEST_ARGS  more arguments of pytest                                     make test PYTEST_ARGS="-k cache -x"
#   JOBS         processes of `make attack`                                   make attack JOBS=16
#   SECONDS, SEED  of `make attack`                                           make attack SECONDS=600 SEED=7
#   KILLS, SEED    of `make kills`                                            make kills KILLS=50
# pip reads its own variables. On Linux the package index serves torch with CUDA; for the CPU build set
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

PYTHON ?= python3
WORKERS ?= auto
PYTEST_ARGS ?=
JOBS ?= 2
SECONDS ?= 3600
SEED ?= 0
KILLS ?= 200

VENV := .venv
VENV_OLDEST := .venv-oldest
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
# The tests are many small computations: one thread a process, one process a core.
PYTEST := -m pytest --numprocesses=$(WORKERS) --maxprocesses=8 --dist=worksteal
SINGLE_THREADED := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

# Two processors that this one can stand in for: x86-64 without wide vectors, and x86-64 with AVX2 and two BLAS threads.
# Each library has a switch of its own, and ignores the names that mean nothing to it; on arm64 that is all of them.
WITHOUT_AVX := ATEN_CPU_CAPABILITY=default OPENBLAS_CORETYPE=Nehalem ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE \
	NPY_DISABLE_CPU_FEATURES="X86_V3 X86_V4 AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR" \
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
WITH_AVX2 := ATEN_CPU_CAPABILITY=avx2 OPENBLAS_CORETYPE=Haswell ONEDNN_MAX_CPU_ISA=AVX2 MKL_CBWR=AVX2 \
	NPY_DISABLE_CPU_FEATURES="X86_V4 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR" \
	OMP_NUM_THREADS=2 MKL_NUM_THREADS=2
# Compiling kernels for a GPU is slow and computes nothing here.
PORTABLE := --ignore=tests/ops/test_triton_compile.py

# What depends on the versions of libraries: loading, the patched model, the cache, the service.
OLDEST_TESTS := tests/test_modeling_esm_turbo.py tests/test_kv_cache.py tests/test_kv_cache_refinements.py \
	tests/test_kv_cache_dropping.py tests/test_context_model.py tests/test_turbo_esm.py \
	tests/test_calibrate.py tests/test_calibration.py tests/test_lean_import.py tests/model tests/tasks/calibration \
	tests/serve/test_app.py tests/serve/test_server.py
NOTEBOOKS = $(wildcard notebooks/*.ipynb)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-portable test-oldest test-interpreter test-docs test-gpu test-mps test-browser attack kills lint format types docs notebooks results clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.installed  ## install, then the whole job on shipped proteins and the embedded model
	$(VENV)/bin/esm-turbo calibrate shipped --max-residues 9000 --out $(VENV)/demo.safetensors
	$(VENV)/bin/esm-turbo evaluate shipped --max-proteins 6 --calibration $(VENV)/demo.safetensors \
		--preset exact turbo3 paper --extend-ks 8 --refresh-ws 0 8

test: $(VENV)/.installed-dev  ## install, then the whole test suite
	$(SINGLE_THREADED) $(VENV)/bin/python $(PYTEST) $(PYTEST_ARGS)

test-portable: $(VENV)/.installed-dev  ## the test suite twice, as on two other processors; not part of .ci/run
	$(WITHOUT_AVX) $(VENV)/bin/python $(PYTEST) $(PORTABLE) $(PYTEST_ARGS)
	$(WITH_AVX2) $(VENV)/bin/python $(PYTEST) $(PORTABLE) $(PYTEST_ARGS)

test-oldest: $(VENV_OLDEST)/.installed  ## loading, model and cache with the oldest supported dependencies
	$(SINGLE_THREADED) $(VENV_OLDEST)/bin/python $(PYTEST) $(OLDEST_TESTS) $(PYTEST_ARGS)

test-interpreter: $(VENV)/.installed-dev  ## the tests of Triton kernels, on the CPU in Triton's interpreter
	$(SINGLE_THREADED) TRITON_INTERPRET=1 $(VENV)/bin/python $(PYTEST) -m interpreter tests/ops tests/model $(PYTEST_ARGS)

test-docs: $(VENV)/.installed-dev  ## run the code blocks of README.md and docs/, page by page
	$(SINGLE_THREADED) $(VENV)/bin/python $(PYTEST) -m docs tests/docs $(PYTEST_ARGS)

test-gpu: $(VENV)/.installed-dev  ## the test suite with the tests that need a CUDA device
	$(VENV)/bin/python -m pytest -m "not browser and not interpreter and not mps and not network and not docs" $(PYTEST_ARGS)

test-mps: $(VENV)/.installed-dev  ## the test suite with the tests that need an Apple GPU
	$(VENV)/bin/python -m pytest -m "not browser and not gpu and not interpreter and not network and not docs" $(PYTEST_ARGS)

test-browser: $(VENV)/.installed-browser  ## drive the page of `esm-turbo serve`, and those of pictures, in Chromium, which the system must have with its driver
	$(SINGLE_THREADED) $(VENV)/bin/python -m pytest -m browser tests/serve tests/pictures $(PYTEST_ARGS)

attack: $(VENV)/.installed-dev  ## attack the command line and the library for SECONDS, with SEED
	$(SINGLE_THREADED) $(VENV)/bin/python -m benchmarks.attack --seconds $(SECONDS) --seed $(SEED) --workers $(JOBS)

kills: $(VENV)/.installed-dev  ## kill workers, shards, actors and drivers of runs until KILLS have died
	$(SINGLE_THREADED) $(VENV)/bin/python -m benchmarks.attack.campaign --kills $(KILLS) --seed $(SEED)

lint: $(VENV)/.installed-dev  ## ruff (rules and format), and the direction of imports
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports

format: $(VENV)/.installed-dev  ## format the code, and let ruff fix what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: $(VENV)/.installed-dev  ## mypy, strict, on the package
	$(VENV)/bin/mypy

docs: $(VENV)/.installed-docs  ## build the documentation site in site/
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

notebooks:  ## run every notebook from top to bottom
ifneq ($(NOTEBOOKS),)
notebooks: $(VENV)/.installed-notebooks
	$(VENV)/bin/python -m pytest --nbmake --nbmake-timeout=600 --override-ini=testpaths= $(NOTEBOOKS)
else
	@echo "no notebooks yet"
endif

results: $(VENV)/.installed-dev  ## measure accuracy anew (hours of one core), then make the tables and images
	$(SINGLE_THREADED) $(VENV)/bin/python -m benchmarks.run results --threads 1 --save
	$(VENV)/bin/python -m benchmarks.report.tables
	$(VENV)/bin/python -m benchmarks.report.plots

clean:  ## remove the environments, caches and builds
	rm -rf $(VENV) $(VENV_OLDEST) build dist site *.egg-info
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Makes the virtual environment $(1), unless it is there with a working pip.
define create_venv
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "esm_turbo needs Python 3.11 or newer, this is " + sys.version.split()[0] + ": name another, as in make PYTHON=python3.12")'
	@$(1)/bin/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(1)
	@echo "installing into $(1) (minutes the first time)"
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call create_venv,$(VENV))
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-browser: $(VENV)/.installed-dev
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,browser]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,docs]'
	@touch $@

$(VENV)/.installed-notebooks: $(VENV)/.installed-dev
	$(VENV)/bin/python $(PIP_INSTALL) -c constraints.txt -e '.[dev,notebooks]'
	@touch $@

$(VENV_OLDEST)/.installed: pyproject.toml constraints-oldest.txt
	$(call create_venv,$(VENV_OLDEST))
	$(VENV_OLDEST)/bin/python $(PIP_INSTALL) -c constraints-oldest.txt -e '.[test]'
	@touch $@

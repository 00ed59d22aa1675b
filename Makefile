# Every target does its own set-up: `.venv` is made, filled and rebuilt only when something it depends on
# has changed, so a second run needs no network. Set-up talks on stderr; stdout is the command's own.

.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules
SHELL := /bin/bash

# The newest interpreter is not always called python3; take the first that is new enough.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$p; exit; fi; \
	done; echo python3)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# Compiled modules are built once, by the rule of $(NATIVE), and not with each installation.
INSTALL := ZBMD_COMPILE=later $(PIP) --no-build-isolation --editable

COMPILED := transport actors collectives training
NATIVE_SOURCES := $(shell find $(COMPILED) -name '*.pyx' -o -name '*.pxd' -o -name '*.h' 2>/dev/null)
RUNTIME := $(VENV)/.stamp-runtime
NATIVE := $(VENV)/.stamp-native
DEV := $(VENV)/.stamp-dev
BENCH := $(VENV)/.stamp-bench
DOCS := $(VENV)/.stamp-docs

# Options of the targets: VERIFY=1 and KILL_SEED=n for demo, PYTEST_ARGS for test, FUZZ_ARGS for fuzz.
DEMO_FLAGS := $(if $(filter-out 0 no false,$(VERIFY)),--verify) $(if $(KILL_SEED),--kill-seed $(KILL_SEED))
# Test files are dealt out to workers, the long ones first. More workers than this would keep real processes from
# their time slices.
TEST_WORKERS := 4
CHECKED := transport actors collectives training tools tests examples src setup.py

.PHONY: rdma-headers help preflight setup demo test test-rdma test-torch fuzz lint docs format clean bench-transport bench-docs

help:
	@echo 'make demo    train, kill a worker, go on; VERIFY=1 compares digests, KILL_SEED=n picks the kill'
	@echo 'make test    run the test suite; PYTEST_ARGS="-k name" narrows it'
	@echo 'make test-rdma  the tests of RDMA, in a machine that has devices for it'
	@echo 'make test-torch  the tests that need PyTorch, which it installs'
	@echo 'make fuzz    any bytes at every decoder, for a minute; FUZZ_ARGS="wire --seconds 600" changes that'
	@echo 'make lint    formatting, lints, types, layers, house rules'
	@echo 'make docs    build the documentation into site/, and look at it in a browser'
	@echo 'make format  reformat the sources'
	@echo 'make bench-transport  time the transport beside its peers'
	@echo 'make bench-docs  render docs/BENCHMARKS.md from docs/results/*.jsonl'
	@echo 'make setup   only make .venv with everything in it; PYTHON=… names the interpreter'
	@echo 'make clean   remove .venv and everything built'

preflight:
	@$(PYTHON) tools/dev/preflight.py

setup: $(DEV) $(NATIVE)

demo: $(RUNTIME) $(NATIVE)
	@$(VENV)/bin/zbmd demo $(DEMO_FLAGS) $(DEMO_ARGS)

test: $(DEV) $(NATIVE)
	@$(PY) -m pytest --numprocesses=auto --maxprocesses=$(TEST_WORKERS) --dist=loadfile \
		--no-loadscope-reorder -m 'not machine and not site' $(PYTEST_ARGS)

# Wants apt's qemu-system-x86, libibverbs-dev and iproute2, and downloads a kernel the first time.
test-rdma: $(DEV) $(NATIVE)
	@$(PY) -m pytest -m machine tests/tools/lab/test_rdma_vm.py $(PYTEST_ARGS)

# Installs PyTorch into $(VENV): the tests of its backend and of its loops, which need nothing else.
TORCH_TESTS := tests/collectives/torch tests/training/torch tests/training/model/test_torch_reference.py \
	tests/tools/bench/test_bench_torch.py tests/tools/chaos/test_kill_loops.py
test-torch: $(DEV) $(NATIVE)
	@$(PY) -c 'import torch' 2>/dev/null || $(PIP) 'torch==2.13.0' >&2
	@$(PY) -m pytest --numprocesses=auto --maxprocesses=$(TEST_WORKERS) --dist=loadfile \
		--no-loadscope-reorder $(TORCH_TESTS) $(PYTEST_ARGS)

# Led by coverage where there is a wheel of atheris for this interpreter; without one the mutations go alone.
fuzz: $(DEV) $(NATIVE)
	@$(PY) -c 'import atheris' 2>/dev/null || $(PIP) --only-binary=:all: 'atheris>=2.3' >&2 || \
		echo 'fuzz: there is no wheel of atheris for this interpreter' >&2
	@$(PY) -m zbmd.tools.fuzzing $(FUZZ_ARGS)

lint: $(DEV) $(NATIVE)
	$(PY) -m ruff check $(CHECKED)
	$(PY) -m ruff format --check $(CHECKED)
	$(PY) -m mypy
	$(PY) -m pyright
	$(VENV)/bin/lint-imports
	$(PY) tools/dev/tidy.py
	$(PY) -m pytest -q tests/repo/test_planted_error.py

# Wants a quiet machine, and apt's openmpi-bin and libopenmpi-dev; it says so if they are missing.
bench-transport: $(BENCH) $(NATIVE)
	@$(PY) -m zbmd.tools.lab.bench.transport $(BENCH_ARGS)

bench-docs: $(RUNTIME) $(NATIVE)
	@$(PY) -m zbmd.tools.dev.bench_docs

# Wants apt's chromium; without it the pages are built and not looked at.
docs: $(DEV) $(DOCS) $(NATIVE)
	@NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(PY) -m mkdocs build --strict --quiet
	@$(PY) -m pytest -q -m site tests/docs/test_site.py tests/tools/dashboard/test_plan_page.py

format: $(DEV)
	$(PY) -m ruff check --fix-only $(CHECKED)
	$(PY) -m ruff format $(CHECKED)

clean:
	rm -rf $(VENV) build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis \
		.import_linter_cache
	find $(COMPILED) -name '*.so' -delete
	rm -f $(patsubst %.pyx,%.c,$(filter %.pyx,$(NATIVE_SOURCES)))
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +

$(PY):
	@$(PYTHON) tools/dev/preflight.py >&2
	@echo 'setup: making $(VENV)' >&2
	@$(PYTHON) -m venv --clear $(VENV) >&2

# The build needs no isolation, because its requirements are in the environment: so a rebuild after an edit
# downloads nothing.
$(RUNTIME): $(PY) pyproject.toml setup.py
	@echo 'setup: installing zbmd and its dependencies into $(VENV)' >&2
	@$(PIP) 'setuptools>=77' 'Cython>=3.1' 'numpy>=2.0' >&2
	@$(INSTALL) . >&2
	@touch $@

# libibverbs-dev that was installed since the last build: what needs it is built now.
RDMA_SINCE := $(and $(wildcard /usr/include/infiniband/verbs.h),$(if $(wildcard transport/rdma/native/_rdma.*.so),,yes))

# Not rebuilt with each edit of pyproject.toml: the interpreter and numpy come with a new $(VENV).
$(NATIVE): setup.py $(NATIVE_SOURCES) $(if $(RDMA_SINCE),rdma-headers) | $(RUNTIME)
	@echo 'setup: building the compiled modules' >&2
	@$(PY) setup.py --quiet build_ext --inplace >&2
	@touch $@

$(DEV): $(RUNTIME) pyproject.toml
	@echo 'setup: installing the development tools into $(VENV)' >&2
	@$(INSTALL) '.[dev]' >&2
	@touch $@

$(DOCS): $(RUNTIME) pyproject.toml
	@echo 'setup: installing what builds the documentation into $(VENV)' >&2
	@$(INSTALL) '.[docs]' >&2
	@touch $@

$(BENCH): $(RUNTIME) pyproject.toml
	@echo 'setup: installing what the benchmarks run beside us into $(VENV)' >&2
	@$(INSTALL) '.[bench]' >&2
	@touch $@

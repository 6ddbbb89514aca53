# Two commands do everything on a fresh machine: `make demo` and `make test`; CI also runs `make test-cuda`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
TORCH  ?= 2.12.1
GPU_PYTHON_VERSION ?= 3.12
# where the tests of cards run: in the virtual environment, or with VENV=none by the interpreter that is there, with
# what `make gpu-wheels` fetched beside it
ifeq ($(VENV),none)
GPU_READY  := gpu-packages/.ready
GPU_PYTHON := $(PYTHON)
GPU_RUN    := PYTHONPATH=src:tests:bench:gpu-packages
else
GPU_READY  := $(VENV)/.ready
GPU_PYTHON := $(BIN)/python
GPU_RUN    := PYTHONPATH=tests:bench
endif
CUDA_VENV  := .venv-cuda$(if $(filter-out 2.12.1,$(TORCH)),-$(TORCH))
STUB       := tests/cuda_stub
VERSIONS ?= 2.11.0 2.15.0
VERSION_TESTS := tests/simulator tests/devices tests/run/test_any_call.py $(addprefix tests/apply/test_,attention_dispatch.py \
	chunked_attention.py compiled.py int8.py page_locking.py tracing.py weight_kinds.py weights.py)
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal

.PHONY: demo test docs test-slow test-gpu gpu-report gpu-wheels test-cuda test-cuda-full test-versions bench chart lint clean

demo: $(READY)  ## a picture inside a memory budget, and where the memory went; on a card, or on one played by the CPU
	@mkdir -p demo-out
	$(BIN)/tightfit run "a large red circle on the left and a small blue square on the right" \
		--device cuda,loopback --level 3 --seed 7 --out demo-out/picture.png --timeline demo-out/memory.png
	@echo "look at demo-out/picture.png and demo-out/memory.png"

test: lint  ## lint, types and tests; of the largest grids some cases
	$(PYTEST)

docs: $(READY)  ## the documentation site, in site/; fails on broken links
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

test-slow: $(READY)  ## proofs that take minutes, and every pipeline class, hours the first time; goes on where it was
	$(PYTEST) -m "slow and not gpu"
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -W ignore -m fuzz --results bench/results/fuzz.jsonl
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -W ignore -m pipeline_classes.proof --results bench/results/pipelines.jsonl
	$(BIN)/python tools/make_pipelines.py

test-gpu: $(GPU_READY)  ## what needs a CUDA card; skipped where there is none. VENV=none: with the python3 that is there
	$(GPU_RUN) $(GPU_PYTHON) -m pytest tests/gpu -m gpu

gpu-report: $(if $(and $(DRY),$(filter-out none,$(VENV))),,$(GPU_READY))  ## a card's first half hour: rates, peaks, times, caps, rivals; DRY=1 on the stub
ifdef DRY
	@test -x $(CUDA_VENV)/bin/python || $(STUB)/setup.sh $(CUDA_VENV) $(TORCH)
	PYTHONPATH=src:tests:bench$(if $(filter none,$(VENV)),:gpu-packages) $(STUB)/run.sh $(CUDA_VENV) python -W ignore bench/gpu_report.py --dry
else
	$(GPU_RUN) $(GPU_PYTHON) -W ignore bench/gpu_report.py
endif

gpu-wheels:  ## what a machine with a card and torch, but without a network, lacks, in gpu-wheels; under 60 MB
	bench/gpu_wheels.sh $(PYTHON) gpu-wheels $(GPU_PYTHON_VERSION)

test-cuda:  ## the CUDA path without a card, on PyTorch's CUDA wheel: TORCH=2.12.1; a quarter of an hour, and 1.5 GB at first
	$(STUB)/test.sh $(CUDA_VENV) $(TORCH) -m "gpu and not full"

test-versions:  ## what depends on torch's version, with the oldest and the newest: VERSIONS="2.11.0 2.15.0"; 40 minutes
	@for version in $(VERSIONS); do $(STUB)/versions.sh $$version $(VERSION_TESTS) || exit 1; done

test-cuda-full:  ## all proofs of the CUDA path; hours, goes on where it was
	$(STUB)/test.sh $(CUDA_VENV) $(TORCH) -m gpu -p cuda_stub.resume --results bench/results/test-cuda.jsonl
	STUB_CARDS=1 $(STUB)/run.sh $(CUDA_VENV) python -W ignore -m cuda_stub.mutants --results bench/results/test-cuda-mutants.jsonl

bench: $(READY)  ## measure, and write bench/results/
	$(BIN)/python bench/fp8.py
	$(BIN)/python bench/gradients.py
	$(BIN)/python bench/levels.py
	$(BIN)/python bench/loading.py --folder "$${TMPDIR:-/tmp}/tightfit-loading"
	$(BIN)/python bench/vae.py
	$(BIN)/python bench/attention.py
	$(BIN)/python bench/activations.py
	$(BIN)/python bench/strips.py
	$(BIN)/python bench/predict.py
	$(BIN)/python bench/streaming.py
	$(BIN)/python bench/budgets.py
	$(BIN)/python bench/several.py
	$(BIN)/python bench/ranks.py
	PYTHONPATH=tests $(BIN)/python -W ignore bench/device_maps.py
	PYTHONPATH=tests $(BIN)/python -W ignore bench/step_cache_rivals.py
	$(BIN)/python bench/step_caches_simulated.py
	$(BIN)/python bench/step_caches_demo.py
	$(BIN)/python bench/rivals.py
	$(BIN)/python bench/weights.py
	$(BIN)/python tools/make_tables.py

chart: $(READY)  ## every known model on a card of each size, and the guides; hours the first time, goes on where it was
	$(BIN)/python bench/chart.py --models all > /dev/null
	$(BIN)/python bench/models.py > /dev/null
	$(BIN)/python tools/make_tables.py
	$(BIN)/python tools/make_guides.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $(READY)

gpu-packages/.ready: $(wildcard gpu-wheels/*.whl)
	@test -d gpu-wheels || { echo "no gpu-wheels: run 'make gpu-wheels' where there is a network, and bring it"; exit 1; }
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-index --no-deps --target gpu-packages gpu-wheels/*.whl
	@touch $@

clean:
	rm -rf $(VENV) .venv-cuda* demo-out site gpu-wheels gpu-packages

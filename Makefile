# `make help` lists what there is. Every target sets up what it needs; a machine with Python and pip is enough.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed
NEWEST := .venv-newest
MODELS := .venv-models
# Tests fork ranks from large processes, which is cheaper with large pages; other C libraries ignore it.
LARGE_PAGES := glibc.malloc.hugetlb=1
# What meets torch and transformers first: capture, masks, ATen handlers, real models on ranks, DTensors and checkpoints, stages.
NEWEST_TESTS := tests/pcg/test_versions.py tests/pcg/capture/test_capture.py tests/pcg/capture/test_masks.py tests/pcg/test_aten.py tests/test_matrix.py \
	tests/lowering/test_private.py tests/lowering/runtime/test_kernels.py tests/lowering/test_module.py tests/lowering/store/test_storage.py tests/lowering/runtime/test_pipeline.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all random cuda newest newest-setup mutants mutants-collectives lint types matrix sweep operators models writes failures bench bench-start bench-search regret bench-accuracy bench-rules bench-gains bench-collectives bench-pieces bench-encodings bench-ring bench-offload bench-order site site-check browser pages format clean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

setup: $(STAMP) ## install everything, in the tested versions, into .venv (done once, and again when they change)

demo: $(STAMP) ## train a 10 M parameter GPT-2 on two local ranks: the plan, the losses, the times
	$(PY) examples/demo.py

test: $(STAMP) ## run the whole test suite
	OMP_NUM_THREADS=1 GLIBC_TUNABLES=$(LARGE_PAGES) $(PY) -m pytest -n 3 --dist loadgroup

test-all: $(STAMP) ## run every case of every catalogue, too: longer, and not timed yet
	SHARDWRIGHT_WHOLE_GRIDS=1 OMP_NUM_THREADS=1 GLIBC_TUNABLES=$(LARGE_PAGES) $(PY) -m pytest -n 3 --dist loadgroup

random: $(STAMP) ## compare 200 random steps each, in pieces, in rings, with values on the host and with unlike stages, with one process's: an hour
	SHARDWRIGHT_RANDOM_CASES=200 OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --timeout 7200 tests/lowering/test_pieces.py tests/lowering/test_rings.py tests/lowering/runtime/test_ring.py tests/lowering/test_offload.py tests/lowering/test_stages_laid_out_unlike.py -k "random or one_process"

cuda: $(STAMP) ## run the tests that need a GPU
	SHARDWRIGHT_CUDA=1 $(PY) -m pytest tests/lowering/test_cuda.py

newest: newest-setup ## run docs/start.md from a wheel, and a part of the suite, with the newest torch and transformers that are tested: 6 GB
	$(NEWEST)/bin/python -m bench.pages --installed docs/start.md
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check -c $(NEWEST)/constraints.txt '.[dev]'
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 3 --dist loadgroup $(NEWEST_TESTS)

newest-setup: ## install a wheel of this checkout with constraints-newest.txt into .venv-newest
	@test -d $(NEWEST) || $(PYTHON) -m venv $(NEWEST)
	@awk -F '==' 'FNR == NR {newest[$$1] = 1} FNR == NR || !($$1 in newest)' constraints-newest.txt constraints.txt > $(NEWEST)/constraints.txt
	rm -rf build
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check -c $(NEWEST)/constraints.txt .

mutants: $(STAMP) ## put small faults into the core, one by one, and see whether its tests notice: 300 of them, 15 to 25 minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.mutants

mutants-collectives: $(STAMP) ## put 3,000 small faults into programs of collectives, and see whether the judge notices those that an exhaustive walk calls wrong: 20 seconds
	$(PY) -m tests.verifier.collectives.mutants 3000

lint: $(STAMP) ## check style, formatting and who imports whom
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports

types: $(STAMP) ## check types
	$(PY) -m pyright --pythonpath $(PY)

matrix: $(STAMP) ## run every model under every layout and write the table in docs/
	$(PY) -m bench.matrix
	OMP_NUM_THREADS=1 $(PY) -m bench.stage_matrix

sweep: $(STAMP) ## run every model in 30 ways of training on 2, 4 and 8 ranks and write the page in docs/: hours; goes on where it was ended
	OMP_NUM_THREADS=1 $(PY) -m bench.sweep

operators: $(STAMP) ## run every operator that torch differentiates under plans and write the page in docs/: 6 to 15 minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.operators

models: $(MODELS)/.installed ## run models of other packages under plans and write the page in docs/: hours; goes on where it was ended
	OMP_NUM_THREADS=1 $(MODELS)/bin/python -m bench.models

$(MODELS)/.installed: bench/models-constraints.txt constraints.txt
	@test -d $(MODELS) || $(PYTHON) -m venv $(MODELS)
	$(MODELS)/bin/python -m pip install --disable-pip-version-check -c constraints.txt torch
	$(MODELS)/bin/python -m pip install --disable-pip-version-check --no-deps -r bench/models-constraints.txt
	@touch $@

writes: $(STAMP) ## compare 7,000 forms of writes in place with eager training: 20 minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.writes

failures: $(STAMP) ## kill a rank, or let it hang, in every phase of a run under three plans, and write docs/failures.md: 20 minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.failures

bench: $(STAMP) ## time lowered programs against hand-written torch.distributed code
	$(PY) -m bench.speed
	OMP_NUM_THREADS=1 $(PY) -m bench.pipelines
	$(PY) -m bench.timeline

bench-start: $(STAMP) ## start one rank of a model larger than this machine; writes a section of docs/large.md: ten minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.start

bench-search: $(STAMP) ## compare plans with the best of a grid, and time planning; writes docs/search.md: two hours; goes on where it was ended
	OMP_NUM_THREADS=1 $(PY) -m bench.grid
	OMP_NUM_THREADS=1 $(PY) -m bench.within
	OMP_NUM_THREADS=1 $(PY) -m bench.sequence
	$(PY) -m bench.search
	$(PY) -m bench.growth

regret: $(STAMP) ## see whether any of 20 random pins makes the plan of a case faster, 43 cases; a section of docs/search.md: an hour and a half; goes on where it was ended
	OMP_NUM_THREADS=1 $(PY) -m bench.regret

bench-accuracy: $(STAMP) ## compare predictions with published runs and with this machine; writes pages and charts in docs/
	$(PY) -m bench.predictions
	$(PY) -m bench.zoo_times

bench-rules: $(STAMP) ## generate and prove rules, mutate them, see which the search uses; writes a page in docs/
	$(PY) -m bench.rules

bench-collectives: $(STAMP) ## synthesize collectives beside their bounds and what others publish; writes docs/collectives.md: four minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.synthesis

bench-pieces: $(STAMP) ## time a tensor-parallel step with its moves in pieces, over a slow link; ends docs/pieces.md: five minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.pieces

bench-ring: $(STAMP) ## time a step whose keys travel in a ring beside one with gathered keys, over a slow link; ends docs/ring.md: ten minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.ring

bench-order: $(STAMP) ## time sums of gradients in the order of need, over a slow link; writes docs/order.md: ten minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.order

bench-offload: $(STAMP) ## time a step whose activations wait on the host, over a simulated link; writes docs/offload.md: three minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.offload

bench-encodings: $(STAMP) ## time steps that send encoded, over a slow link, and train with each encoding; ends docs/encodings.md: ten minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.encodings

bench-gains: $(STAMP) ## see which rules fire on which models, and what they gain; ends docs/rules.md with its tables
	$(PY) -m bench.gains

site: $(VENV)/.docs ## build the documentation into site/, with every link checked; nothing in it is loaded from other hosts
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict
	@! grep -rlE '<(script|link|img|iframe)[^>]+(src|href)="?(https?:)?//' site --include='*.html'

site-check: $(STAMP) ## run every command and snippet of the documentation, the slow ones too: 10 to 20 minutes
	OMP_NUM_THREADS=1 $(PY) -m bench.pages

$(VENV)/.docs: $(STAMP)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

browser: ## install Chromium, in which pages of plans are tested (Debian and Ubuntu, as root)
	@command -v chromium > /dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends chromium; } >&2

pages: $(STAMP) ## open the page of every model of the zoo and of five large plans in Chromium: a quarter of an hour
	OMP_NUM_THREADS=1 $(PY) -m bench.browser

format: $(STAMP) ## format the code and mend what the linter can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean: ## remove .venv, builds and caches
	rm -rf $(VENV) $(NEWEST) $(MODELS) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || \
		{ echo "shardwright: no '$(PYTHON)' on the PATH; install Python 3.11 or newer, or say which: make PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "shardwright: needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1); say which to use: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || \
		{ echo "shardwright: $(PYTHON) cannot make a virtual environment, its modules venv and ensurepip are missing; install them (on Debian and Ubuntu the package python3-venv) or use another Python: make PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# Two commands do everything on a fresh Linux machine: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
PINNED := 2.13.0
TORCH  ?= torch==$(PINNED)
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: setup demo test lint types imports pytest golden site clean

setup: $(VENV)/.ready

# A torch that the machine already has is kept (2.11 or later, CUDA builds included); otherwise $(TORCH) is installed.
$(VENV)/.ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "autopar needs Python 3.11 or later; this is $$($(PYTHON) --version). Set PYTHON=…"; exit 2; }
	@if $(PYTHON) -c 'import torch, sys; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11))' 2>/dev/null; \
	then echo "keeping the torch of $(PYTHON)"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	else $(PYTHON) -m venv $(VENV); $(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/pip install --quiet "$(TORCH)"; fi
	@$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

DEMO := build/demo

# Plans a small GPT-2 for two CPU processes, writes plan.json and train.py, and trains with torchrun.
demo: setup
	$(BIN)/autopar plan models_zoo/gpt2.py --arg size=tiny --gpus 2 --device cpu --global-batch 16 --precision fp32 -o $(DEMO) --force
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node 2 $(DEMO)/train.py --steps 60 --export $(DEMO)/model.safetensors

# Types and imports are checked while tests run: one after another would leave a core idle.
test: lint
	@$(MAKE) --no-print-directory --jobs 3 pytest types imports

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# torch's own annotations differ from version to version: ours fit those of $(PINNED).
types: setup
	@if $(BIN)/python -c 'import torch, sys; sys.exit(torch.__version__.split("+")[0] != "$(PINNED)")'; \
	then echo $(BIN)/mypy; $(BIN)/mypy; else echo "mypy is left out: types are checked with torch $(PINNED)"; fi

imports: setup
	$(BIN)/lint-imports

pytest: setup
	$(BIN)/pytest -n $(JOBS) --max-worker-restart 0

golden: setup  # remakes what is compared, the notebook, and the output shown on pages
	$(BIN)/python docs/render_readme.py
	$(BIN)/python -m tests.codegen.golden

SITE := build/site-source

# Pages as a site in build/site: what they link to is copied as it lies here, and a dead link fails.
site: setup
	$(BIN)/pip install --quiet --editable ".[site]"
	rm -rf $(SITE) && mkdir -p $(SITE)/benchmarks
	cp -rL *.md LICENSE docs examples $(SITE) && cp -r benchmarks/results $(SITE)/benchmarks
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# "make help" lists the targets. All of them make their environment in .venv the first time and use
# it from then on. PYTHON=... picks another Python, ARGS=... goes to what is run
# (make demo ARGS=--quick).

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
NEWEST := $(CURDIR)/$(VENV)/newest
CANDIDATES := python3 python3.14 python3.13 python3.12 python3.11 python3.10 python
MODERN := import sys; sys.exit(sys.version_info < (3, 10))
PYTHON ?= $(shell for p in $(CANDIDATES); do \
	$$p -c '$(MODERN)' >/dev/null 2>&1 && { echo $$p; break; }; done)
ARGS ?=

.PHONY: help demo test lint unit doctest gates docs bench clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The text behind two number signs is the help.
help: ## list the targets
	@echo "Usage: make TARGET [ARGS=...] [PYTHON=...]"
	@sed -n 's/^\([a-z]*\):[^#]*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r target text; do printf '  %-10s%s\n' "$$target" "$$text"; done

demo: $(STAMP) ## check this machine, train a small GPT, run a long sequence; writes report.html
	$(BIN)/python -m demo $(ARGS)

test: $(STAMP) ## lint, unit and doctest
	$(MAKE) -j5 $(PARTS) lint doctest

lint: $(STAMP) ## style, plain words, types, and which module may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/plain_words.py src demo examples benchmarks tools tests docs *.md
	$(BIN)/python tools/form.py src demo examples benchmarks tools tests
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

# Parts, five at a time. One test seldom keeps two cores busy, and some wait. The first part compiles
# the kernels of a CPU, which the last three read from its cache; they are the longest together, so
# both cores have work until the end. Idle threads sleep: those of torch and numpy spin at the end of
# an operation, on the core of another part. Triton's interpreter has to be on before anything
# imports triton: a process of its own. It is slow: float32 here, and a bias that all share; float16
# and tiles of every shape without the -k.
PARTS := unit-cpu unit-emulator unit-interpreter unit-backward unit-files unit-folders \
	unit-distributed
# What a change of a GPU kernel needs besides. They take as long as everything else. The marker
# "gates" has cases of the emulator at more head sizes, and drawn ones; unit-backward has each case
# at one size.
GATES := gates-backward gates-forward gates-newest gates-targets gates-sizes
APART := tests/compile tests/emulator tests/hopper tests/triton tests/distributed
# files of tests/triton that run whole
QUICK := test_ahead or test_few or test_launch or test_packed_order or test_replay or \
	test_row_copies or test_slot_sums or test_unit_copies
HOPPER := tests/compile/test_hopper.py tests/compile/test_hopper_backward.py
BACKWARD := tests/hopper/test_backward.py
CPU := $(wildcard tests/test_cpu*.py tests/test_amx.py)
test unit gates: export OMP_WAIT_POLICY := passive
test unit gates: export OPENBLAS_NUM_THREADS := 1
unit: $(STAMP) ## the tests
	$(MAKE) -j5 $(PARTS)

gates: $(STAMP) ## compile all GPU kernels for all targets, read Hopper's machine code, emulate more
	$(MAKE) -j3 $(GATES)

.PHONY: $(PARTS) $(GATES)
unit-files: $(STAMP)
	$(BIN)/python -m pytest $(filter-out $(CPU),$(wildcard tests/test_*.py)) $(ARGS)

unit-distributed: $(STAMP)
	$(BIN)/python -m pytest tests/distributed $(ARGS)

unit-cpu: $(STAMP)
	$(BIN)/python -m pytest $(CPU) $(ARGS)

unit-folders: $(STAMP)
	$(BIN)/python -m pytest tests --ignore-glob 'tests/test_*.py' $(APART:%=--ignore %) $(ARGS)

gates-targets: $(STAMP)
	$(BIN)/python -m pytest tests/compile $(HOPPER:%=--ignore %) $(ARGS)

gates-forward: $(STAMP)
	$(BIN)/python -m pytest tests/compile/test_hopper.py $(ARGS)

gates-backward: $(STAMP)
	$(BIN)/python -m pytest tests/compile/test_hopper_backward.py $(ARGS)

# The newest triton next to the one of constraints.txt: its private interfaces, and each kind of
# kernel once.
gates-newest: $(NEWEST)/installed
	PYTHONPATH=$(NEWEST) $(BIN)/python -c "import triton; print('triton', triton.__version__); \
		assert triton.__file__.startswith('$(NEWEST)')"
	PYTHONPATH=$(NEWEST) $(BIN)/python -m pytest tests/compile -m newest $(ARGS)

$(NEWEST)/installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(NEWEST) triton
	@touch $@

gates-sizes: $(STAMP)
	$(BIN)/python -m pytest $(BACKWARD) -m gates $(ARGS)

unit-backward: $(STAMP)
	$(BIN)/python -m pytest $(BACKWARD) -m "not gates" $(ARGS)

unit-emulator: $(STAMP)
	$(BIN)/python -m pytest tests/emulator tests/hopper $(BACKWARD:%=--ignore %) $(ARGS)

unit-interpreter: $(STAMP)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/triton \
		-k "float32 or shared-11qk or another_form or lists_hold or $(QUICK)" $(ARGS)

doctest: $(STAMP) ## the examples in docstrings
	$(BIN)/python -m pytest --doctest-modules src demo

docs: $(STAMP) ## the documentation, in build/docs (index.html is its first page)
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs build/docs $(ARGS)

bench: $(STAMP) ## time against PyTorch's own attention; writes benchmarks/results/cpu.csv
	$(BIN)/python -m benchmarks --device cpu --csv benchmarks/results/cpu.csv $(ARGS)
	$(BIN)/python -m benchmarks --device cpu --cells memory --only H8 --passes memory --turns 1

# A Python that was built without ensurepip (Debian's, without python3-venv) makes no pip in the
# environment; then its own pip installs there.
$(STAMP): pyproject.toml constraints.txt
	@$(if $(PYTHON),,echo "rowmax needs Python 3.10 or newer, and found none of: $(CANDIDATES)" \
		"(make PYTHON=/path/to/python3 names one)" >&2; exit 1)
	@$(PYTHON) -c '$(MODERN)' || { echo "rowmax needs Python 3.10 or newer; $(PYTHON) is" \
		"`$(PYTHON) --version 2>&1`" >&2; exit 1; }
	@echo "Making $(VENV) with `$(PYTHON) --version` (once; torch is a large download)"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || $(PYTHON) -m venv --without-pip $(VENV)
	@if $(BIN)/python -m pip --version >/dev/null 2>&1; then pip="$(BIN)/python -m pip"; \
		else pip="$(PYTHON) -m pip --python $(BIN)/python"; fi; \
		$$pip install --disable-pip-version-check --constraint constraints.txt --editable '.[cpu,cli,docs,dev]'
	@touch $@

clean: ## remove .venv, the report and caches
	rm -rf $(VENV) report.html report.json build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache

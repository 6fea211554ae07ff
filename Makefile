# Needs Python 3.11 or later with pip and venv; everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
PIP_INSTALL := $(BIN)/pip --quiet --disable-pip-version-check install --constraint constraints.txt --editable

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test lint format bench gpu-check clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

demo: .venv/.demo ## Export the demo pair and run it drafted and plain, side by side
	$(BIN)/slipstream demo

# torch's threads spin while they wait: those of two processes would take the cores from each other
test: lint ## Lint, check types and run the tests; PYTEST_ARGS goes to pytest
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

lint: .venv/.test ## Check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: .venv/.test ## Fix style and format in place
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: .venv/.test ## Measure: the demo pair against transformers, drafted against plain, graphs before and after rewriting
	$(BIN)/python -m tests.benchmarks.bench_demo
	$(BIN)/python -m tests.benchmarks.bench_onnxruntime

# Installs nothing: what there is to check is what this machine has, and pip might put the CPU's onnxruntime over it.
gpu-check: ## Check and measure on this GPU what is installed for it, into gpu-check.json
	$(BIN)/pytest -m gpu -rs tests/test_gpu.py

clean: ## Remove .venv, caches and build outputs
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist

.venv/pyvenv.cfg:
	@echo "Creating .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/pyvenv.cfg
	@echo "Installing slipstream and what exporting needs (torch is large: minutes)"
	@$(PIP_INSTALL) '.[export]'
	@touch $@

# TensorRT-RTX is for the tests that have it parse the graphs and build engines, which needs no GPU.
.venv/.test: pyproject.toml constraints.txt | .venv/pyvenv.cfg
	@echo "Installing slipstream and what the tests need (torch and TensorRT-RTX are large: minutes)"
	@$(PIP_INSTALL) '.[export,dev,tensorrt-rtx]'
	@touch $@ .venv/.demo

# `make help` lists the targets.
#
# PYTHON chooses the interpreter for the virtual environment (3.11 or newer), ARGS goes to pytest:
#   make setup PYTHON=/usr/bin/python3.11
#   make test ARGS="-k cache"

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
TORCH  := $(shell sed -n '/^torch==/p' constraints.txt)
ORT    := $(shell sed -n '/^onnxruntime==/p' constraints.txt)
OTHER  := .venv-clients
TRAVEL := .venv-programs
MODELS := .venv-coverage
OLDEST := .venv-oldest
CODE   := $(wildcard exportkit tests gallery benchmarks docs/*.py)
PIP    := $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt
ARGS   ?=

# No target loads anything from the Hugging Face hub.
export HF_HUB_OFFLINE := 1

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-fast durations trust lint type docs doctest gallery bench peers conformance coverage oldest clients build clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)$$/\1|\2/p' Makefile | awk -F'|' '{printf "  make %-11s  %s\n", $$1, $$2}'

setup: $(STAMP)  ## Build .venv with exportkit and every tool, at the versions of constraints.txt
	@echo "Ready in $(VENV). Next: make demo, make test."

# The build backend (setuptools) is installed with torch, so no isolated build environment is needed.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "Creating $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing $(TORCH) (the largest part, some minutes)"
	@$(PIP) $(TORCH) setuptools
	@echo "Installing exportkit and its tools"
	@$(PIP) --no-build-isolation -e '.[dev,docs]'
	@touch $@

demo: $(STAMP)  ## Take three small models from a few calls to proven ONNX files
	@$(BIN)/exportkit demo

test: $(STAMP)  ## Run the tests on two processes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

test-fast: $(STAMP)  ## Run the shortest tests, which take about three minutes
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not slow" $(ARGS)

durations: $(STAMP)  ## Run the tests and record the slow ones in tests/durations.json
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --write-durations $(ARGS)

trust: $(STAMP)  ## Count right, loud and silent among small adversarial models
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.trust $(ARGS)

lint: $(STAMP)  ## Check style and format with ruff
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check $(CODE)

type: $(STAMP)  ## Check types with mypy (strict)
	@$(BIN)/mypy exportkit

docs: $(STAMP)  ## Build the documentation, gallery included, in docs/_build/html
	@rm -rf docs/_build docs/auto_gallery docs/sg_execution_times.rst  # an old page or an old warning must not hide a new one
	@$(BIN)/sphinx-build -q -W docs docs/_build/html
	@echo "Documentation: docs/_build/html/index.html"

doctest: $(STAMP)  ## Run the code examples of the documentation
	@$(BIN)/sphinx-build -q -b doctest -D plot_gallery=0 docs docs/_build/doctest
	@echo "The documentation's examples pass."

gallery: $(STAMP)  ## Run every gallery example as a script
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; count=0; \
	for file in gallery/plot_*.py; do \
	    test -e "$$file" || continue; \
	    printf '%s ... ' "$$file"; start=$$(date +%s); \
	    if (cd gallery && ../$(BIN)/python "$${file#gallery/}") >"$$log" 2>&1; then \
	        echo "ok ($$(( $$(date +%s) - start )) s)"; count=$$((count + 1)); \
	    else \
	        echo "FAILED"; cat "$$log"; exit 1; \
	    fi; \
	done; \
	echo "Gallery examples that ran: $$count"

bench: $(STAMP)  ## Run the benchmarks
	@$(BIN)/python benchmarks/imports.py
	@$(BIN)/python benchmarks/line.py
	@$(BIN)/python benchmarks/observe.py
	@$(BIN)/python benchmarks/domain.py
	@$(BIN)/python benchmarks/capture.py
	@$(BIN)/python benchmarks/trace.py
	@$(BIN)/python benchmarks/export.py
	@$(BIN)/python benchmarks/loading.py
	@$(BIN)/python benchmarks/quantisation.py
	@$(BIN)/python benchmarks/architectures.py
	@$(BIN)/python benchmarks/running.py

peers: $(STAMP)  ## Let three tools export the same models (docs/comparison.rst)
	@$(BIN)/python benchmarks/peers.py

conformance: $(STAMP)  ## Compare torch's own operator samples with exported graphs (docs/conformance.rst)
	@OMP_NUM_THREADS=1 PYTHONPATH=benchmarks $(BIN)/python benchmarks/conformance $(ARGS)

# The libraries are installed without their dependencies, since some would replace torch; torchaudio is published with
# extensions for CUDA only, and its models run without them.
$(MODELS)/.stamp: benchmarks/coverage/requirements.txt benchmarks/coverage/dependencies.txt pyproject.toml constraints.txt
	@test -x $(MODELS)/bin/python || $(PYTHON) -m venv $(MODELS)
	@echo "Installing $(TORCH) and libraries of models in $(MODELS) (some minutes)"
	@$(MODELS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt $(TORCH) setuptools
	@$(MODELS)/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation \
	    -e '.[runtime]' -r benchmarks/coverage/dependencies.txt
	@$(MODELS)/bin/python -m pip install -qq --disable-pip-version-check --no-deps -r benchmarks/coverage/requirements.txt
	@rm -rf $(MODELS)/lib/python*/site-packages/torchaudio/lib
	@touch $@

coverage: $(MODELS)/.stamp  ## Export models of other libraries and research code (docs/coverage.rst)
	@OMP_NUM_THREADS=1 PYTHONPATH=benchmarks:. $(MODELS)/bin/python benchmarks/coverage $(ARGS)

$(OLDEST)/.stamp: pyproject.toml constraints.txt
	@test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	@sed -n '/^dependencies/,$$s/.*"\([a-z-]*\)>=\([0-9.]*\)".*/\1==\2/p' pyproject.toml >$(OLDEST)/versions.txt
	@echo "Installing in $(OLDEST) (some minutes): $$(tr '\n' ' ' <$(OLDEST)/versions.txt)"
	@$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) setuptools
	@$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check -c $(OLDEST)/versions.txt --no-build-isolation \
	    -e '.[runtime]' expecttest hypothesis psutil pytest pytest-timeout
	@touch $@

oldest: $(OLDEST)/.stamp  ## Run the demo and a part of the tests with the oldest versions of pyproject.toml
	@$(OLDEST)/bin/python -m exportkit demo
	@OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -m "not slow" tests/plan tests/running tests/onnx_files/test_forms.py

# optimum-onnx needs an older transformers than exportkit is tested with, hence the second environment.
$(OTHER)/.stamp: tests/clients/requirements.txt constraints.txt
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@echo "Installing optimum-onnx and $(TORCH) in $(OTHER) (some minutes)"
	@$(OTHER)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) $(ORT) -r tests/clients/requirements.txt
	@touch $@

# The environment in which programs are read has neither exportkit nor transformers.
$(TRAVEL)/.stamp: tests/clients/programs.txt constraints.txt
	@test -x $(TRAVEL)/bin/python || $(PYTHON) -m venv $(TRAVEL)
	@echo "Installing OpenVINO, ExecuTorch and $(TORCH) in $(TRAVEL) (some minutes)"
	@$(TRAVEL)/bin/python -m pip install -qq --disable-pip-version-check $(TORCH) setuptools -r tests/clients/programs.txt
	@touch $@

clients: $(STAMP) $(OTHER)/.stamp $(TRAVEL)/.stamp  ## Let optimum, OpenVINO, ExecuTorch and AOTInductor take exported models
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	OMP_NUM_THREADS=1 $(BIN)/python tests/clients/export_models.py "$$folder" && \
	OMP_NUM_THREADS=1 $(OTHER)/bin/python tests/clients/check_optimum.py "$$folder" && \
	OMP_NUM_THREADS=1 $(TRAVEL)/bin/python tests/clients/check_programs.py "$$folder"

build: $(STAMP)  ## Build the wheel and the source archive in dist/
	@rm -rf build dist
	@$(BIN)/python -m build -qq --no-isolation
	@ls dist/*

clean:  ## Remove what the other targets made, the environments excepted
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@rm -rf docs/_build docs/auto_gallery docs/sg_execution_times.rst benchmarks/results
	@find . -name '.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# make demo    set up what is missing and run the demonstration
# make test    set up what is missing and run the tests
# make lint | types | bench | docs | wheel | clean
#
# Environments are made on first use and again only when pyproject.toml changes: .venv; .venv-hosts
# with the frameworks that cannot stand beside FedML (other releases of protobuf); .venv-docs.
# FedML 0.9.6 installs on Python 3.8 to 3.11 only, so 3.11 and 3.10 are tried first;
# PYTHON=/path/to/python overrides.

USABLE := -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for p in python3.11 python3.10 python3 python; do \
	if $$p $(USABLE); then echo $$p; break; fi; done)
endif
ifeq ($(strip $(PYTHON)),)
$(error No Python 3.10 or later with venv was found; set PYTHON=/path/to/python)
endif

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
HOSTS := .venv-hosts
HOSTS_READY := $(HOSTS)/.ready
RIVALS := $(VENV)/.rivals
FEDML := $(shell $(PYTHON) -c 'import sys; print("fedml,test-fedml," * (sys.version_info < (3, 12)))')
# Flower 1.42 wants Python 3.11.
FLOWER := $(shell $(PYTHON) -c 'import sys; print("flower-sim," * (sys.version_info >= (3, 11)))')

.PHONY: demo test lint types bench docs wheel clean

demo: $(READY)
ifeq ($(strip $(FEDML)),)
	$(BIN)/python examples/demo/federation_demo.py
else
	$(BIN)/python examples/fedml_demo/demo.py
endif

# Two processes that share the tests; torch in each has one core.
TWO := -n 2 --dist worksteal
test: export OMP_NUM_THREADS := 1
test: $(READY) $(HOSTS_READY)
ifeq ($(strip $(FEDML)),)
	@echo "Left out: the FedML adapter's tests. FedML 0.9.6 stops at Python 3.11: install one (from the system, pyenv or 'uv python install 3.11') and run 'make clean test'."
endif
ifeq ($(strip $(FLOWER)),)
	@echo "Left out: the Flower adapter's tests. Flower 1.42 starts at Python 3.11."
endif
	$(BIN)/python -m pytest --doctest-modules -q -p no:cacheprovider craft_adapters models adapters/ditto --no-header
	$(HOSTS)/bin/python -m pytest $(TWO) tests/flower tests/nvflare tests/rules/test_oracles.py tests/test_docs.py tests/test_docstrings.py
	$(BIN)/python -m pytest $(TWO)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/python -c "from setuptools import setup; setup()" -q build_py --build-lib build/types
	MYPYPATH=build/types $(BIN)/mypy

# The tables, all numbers and pictures go to build/bench; QUICK=--quick takes small sizes.
bench: $(READY) $(RIVALS)
	$(BIN)/python benchmarks/precision.py --out build/bench $(QUICK)
	$(BIN)/python benchmarks/scaling.py --out build/bench $(QUICK)
	$(BIN)/python benchmarks/aggregate.py --out build/bench $(QUICK)
	$(BIN)/python benchmarks/rules.py --out build/bench $(QUICK)

# Without them the benchmarks run too, and say that they are missing.
$(RIVALS): $(READY)
	-$(BIN)/python -m pip install --quiet --editable ".[bench]" && touch $@

# The packages first as they are installed: the pages of the API are read from them there. Nothing is
# imported, so this environment has what the extra `docs` names and no torch.
DOCS := .venv-docs
DOCS_READY := $(DOCS)/.ready
DOCS_NEEDS := from importlib.metadata import requires; \
	print(*(r.split(";")[0] for r in requires("craft-adapters") if "docs" in r.split(";")[-1]))

docs: $(DOCS_READY)
	rm -rf build/docs
	$(DOCS)/bin/python -c "from setuptools import setup; setup()" -q build_py --build-lib build/docs
	NO_MKDOCS_2_WARNING=true $(DOCS)/bin/mkdocs build --strict

$(DOCS_READY): pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --no-deps --editable .
	$(DOCS)/bin/python -m pip install --quiet $$($(DOCS)/bin/python -c '$(DOCS_NEEDS)')
	touch $@

wheel: $(READY)
	$(BIN)/python -m build --wheel --no-isolation --outdir dist .

clean:
	rm -rf $(VENV) $(HOSTS) $(DOCS) build dist *.egg-info

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable ".[$(FEDML)plots,data,run,rules,test,dev]"
	touch $@

$(HOSTS_READY): pyproject.toml
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --editable ".[$(FLOWER)nvflare,rules,test]"
	touch $@

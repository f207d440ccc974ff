# A fresh machine needs Python 3.11 or newer with pip, and a package index. Nothing is installed outside .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test full codegen sweep faults fuzz check docs

demo: $(VENV)/demo.stamp
	$(BIN)/quantkit demo examples/stories260K --text examples/stories.txt --out demo-output

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n auto --dist worksteal

# Every case of every test, which takes an hour: those that `test` samples, and those of the two below.
full: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n auto --dist worksteal -m ""

# Every kernel of every format for every GPU that it is for, which takes minutes; `test` compiles a part.
codegen: $(VENV)/test.stamp
	$(BIN)/python -m pytest -n auto --dist worksteal -m slow tests/kernels/test_codegen.py

# Every failing call, kill and changed byte, then hostile files; the figures are JSON. `test` has a part of them.
SWEEP ?= --jobs 2 --seconds 14400
sweep: $(VENV)/test.stamp
	$(BIN)/python -m tests.reliability $(SWEEP) --out hardening.json

# The first half of it: failing calls, kills and changed bytes, which take two hours on 2 cores.
faults: $(VENV)/test.stamp
	$(BIN)/python -m tests.reliability $(SWEEP) --cases 0 --out faults.json

# Hostile files of every kind, mutated; what is found is written to fuzz-findings.
FUZZ ?= --cases 1000000 --jobs 2
fuzz: $(VENV)/test.stamp
	$(BIN)/python -m tests.fuzz $(FUZZ)

check: $(VENV)/test.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site, in site/: pages of docs and the docstrings of the Python API, with every link checked. Needs no torch.
DOCS := .venv-docs
docs: $(DOCS)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

EXTRA := import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
	print(*project["optional-dependencies"]["docs"], sep="\n")
$(DOCS)/docs.stamp: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -c '$(EXTRA)' > $(DOCS)/requirements.txt
	$(DOCS)/bin/python -m pip install --quiet -r $(DOCS)/requirements.txt
	touch $@

# torch comes first and pinned: asked for as a dependency, pip would take the newest build with its CUDA packages.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r constraints.txt
	touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[plots]'
	touch $@

$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

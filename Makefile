# Every target but `clean` needs Python 3.10 or newer and nothing else: the first one makes the environment .venv.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE :=  # modules are compiled when they are first imported, and kept

.PHONY: demo test quick docs clean

demo: .venv/installed
	rm -rf demo
	$(BIN)/hiap demo --out demo

test: .venv/installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

quick: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal -m "not slow"

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

.venv/installed: pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --disable-pip-version-check --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv demo runs site

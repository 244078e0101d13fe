# make report   a report on the shipped models, in $(OUT)       make test   the default tests
# make lint     style and imports                                make quick   a smaller report, in under three minutes
# make docs     the site, in build/site                          make gallery  docs/gallery.md and its pictures
PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/first
WORKERS ?= 2
BIN := $(VENV)/bin
PINS := -c constraints.txt

.PHONY: report quick test lint docs gallery clean

report: $(VENV)/.installed
	$(BIN)/loopscope report --out $(OUT)
	@echo "Open $(CURDIR)/$(OUT)/report.html in a browser."

quick: $(VENV)/.installed
	$(BIN)/loopscope report --quick --out $(OUT)
	@echo "Open $(CURDIR)/$(OUT)/report.html in a browser."

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(PINS) -e .
	touch $@

$(VENV)/.installed-test: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(PINS) -e '.[test,docs]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-dev: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install $(PINS) -e '.[dev,test,docs]'
	touch $(VENV)/.installed $(VENV)/.installed-test $@

docs: $(VENV)/.installed-test
	$(BIN)/mkdocs build --strict

gallery: $(VENV)/.installed
	$(BIN)/python -m figures.gallery_page

clean:
	rm -rf build dist *.egg-info

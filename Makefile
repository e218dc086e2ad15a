# README's two commands are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup test test-quick demo lint clean

setup: $(READY)

# torch first and pinned: a loose requirement would take the newest build with gigabytes of CUDA packages.
# DS_BUILD_OPS=0: DeepSpeed compiles what it needs at first use.
$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV): about 3 minutes, 2 GB (once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q -c constraints.txt "$$(grep '^torch==' constraints.txt)" "setuptools>=77" wheel
	@DS_BUILD_OPS=0 $(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $(READY)

lint: $(READY)
	@$(BIN)/ruff check toolkit tests examples
	@$(BIN)/ruff format --check toolkit tests examples
	@$(BIN)/mypy

clean:
	rm -rf $(VENV) runs build

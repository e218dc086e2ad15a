# README's two commands are `make demo` and `make test`; each sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup test test-quick test-due weekly-families demo docs lint presets gpu-evidence clean

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
	@$(BIN)/ruff check toolkit benchmarks docsite tools tests examples ds_configs
	@$(BIN)/ruff format --check toolkit benchmarks docsite tools tests examples ds_configs
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

clean:
	rm -rf $(VENV) runs build

demo: $(READY)
	@echo "LoRA on a pretrained model, two processes on the CPU: 5 to 6 minutes on two cores, everything goes to runs"
	@$(BIN)/python examples/demo/demo.py

test: $(READY)
	@echo "what README promises, guarded once: 12 to 20 minutes on two cores"
	@$(BIN)/python tests/sets.py run default

test-quick: $(READY)
	@echo "the tests that start no process: 3 to 5 minutes on two cores"
	@$(BIN)/python tests/sets.py run unit

# Nights, other people's packages and the week: what has not been seen green on this version, hours on two cores.
test-due: $(READY)
	@$(BIN)/python tests/sets.py due --run

TYPES = causal-lm seq2seq-lm sequence-classification token-classification masked-lm image-classification \
	image-text-to-text speech-seq2seq
FIRST = ddp:LoRA zero3:LoRA fsdp2:LoRA fsdp2:full
# Every model type of the installed transformers; hours on two cores. What is measured is not measured again.
weekly-families: $(READY)
	-@$(BIN)/python -m tests.families docs/measurements/model-types.md --cells $(FIRST) --types $(TYPES)
	@$(BIN)/python -m tests.families docs/measurements/model-types.md --types $(TYPES)

docs: $(READY)
	@echo "the documentation site, strictly, into build/site: about a minute"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --clean
	@$(BIN)/python -m docsite.check_links build/site
	@$(BIN)/python -m docsite.check_search build/site

presets: $(READY)
	@$(BIN)/python ds_configs/write.py

# On a machine with an NVIDIA GPU, with or without a .venv: exit 0 complete, 1 cells failed, 3 unfinished (the same
# command goes on). Everything lands in docs/measurements/<gpu>-<date>.
GPU_PYTHON ?= $(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON))
gpu-evidence:
	@$(GPU_PYTHON) -m benchmarks.gpu_evidence all $(if $(OUT),--out $(OUT))

# Two commands do everything: `make demo` runs the main job, `make test` checks the project.
# Both set up .venv by themselves (Python 3.11 or 3.12; about 11 GB with SGLang and torch); the second .venv-vllm, too.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed-$(shell cksum pyproject.toml | cut -d' ' -f1)
# vLLM wants other releases of torch and others than SGLang: an environment of its own (3.5 GB)
VLLM_VENV  := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed-$(shell cksum pyproject.toml | cut -d' ' -f1)

# tests start hundreds of processes: each would compile this project, and each worker rewrite the tests, again
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help setup demo test lint unit slow integration vllm bench soak gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         record both sides of the demo draft, healthy and broken, and diff them"
	@echo "make test         lint, types, layers, and every test (the real SGLang and speculators, on CPU)"
	@echo "make unit         the quick tests: they start no host"
	@echo "make slow         whole recordings, comparisons and commands, without a host"
	@echo "make vllm         the tests that start vLLM, in .venv-vllm"
	@echo "make bench        what recording and diffing cost (prints; asserts nothing)"
	@echo "make soak         a server under load for some minutes: recorded and not, bad disks, bad clients"
	@echo "make gpu          what only a machine with a GPU can show; says so where there is none"

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip==25.3
	$(BIN)/python -m pip install --quiet --editable '.[train,serve]' --group dev
	# its pins cannot be met beside SGLang's; what of it is recorded needs none of them
	$(BIN)/python -m pip install --quiet --no-deps specforge==0.2.0
	@rm -f $(VENV)/.installed-*
	@touch $@

demo: $(STAMP)
	$(BIN)/eagle-trace demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# a worker takes neighbours, which share what a file sets up, and later from those that are not through
unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit -m 'not slow' -n auto --dist worksteal

slow: $(STAMP)
	$(BIN)/python -m pytest tests/unit -m slow -n auto --dist worksteal

# a start of a host is mostly waiting: two workers, the tests of a file in one of them, share their servers
integration: $(STAMP)
	$(BIN)/python -m pytest -m integration -n 2 --dist loadfile

# the wheel for a CPU pins torch's build for a CPU; torchvision and its like come along for CUDA, and break transformers
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check pip==25.3
	$(VLLM_VENV)/bin/python -m pip install --quiet --editable . --group vllm
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps speculators==0.9.0 hs-connectors==0.9.0 datasets==5.1.0 specforge==0.2.0
	@rm -f $(VLLM_VENV)/.installed-*
	@touch $@

vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest -m vllm tests/vllm

test: lint unit slow integration vllm

bench: $(STAMP)
	$(BIN)/python tests/benchmarks/bench_diff.py
	$(BIN)/python tests/benchmarks/bench_record.py
	$(BIN)/python tests/benchmarks/bench_check.py
	$(BIN)/python tests/benchmarks/bench_report.py

soak: $(STAMP)
	$(BIN)/python tests/benchmarks/soak.py

gpu: $(STAMP)
	$(BIN)/python -m tests.gpu.check

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache

# `make run` trains a small GPT, `make test` runs the quick tests, `make test-all` the slow ones too (hours), `make docs` builds
# the site of docs/, `make bench-readme` measures README.md's figures (12 minutes on two quiet cores) and writes them into the
# pages (ARGS=--print: only prints them). On a fresh Linux machine with Python nothing else is needed:
# each installs what it needs in .venv first, with the build of PyTorch that suits the machine (CUDA where there is a
# driver, else CPU). ARGS are passed on: make run ARGS=--trainer.max_steps=20, make test ARGS=tests/test_drawing.py
# With LOCKED=1, run and test install the versions in requirements/ (`.ci/lock` writes them), whose hashes pip compares; torch
# is not among them, since its builds for CPUs and for CUDA differ. Without it, they install the newest versions allowed.

PYTHON ?= python3
VENV ?= .venv
LOCKED ?=
TORCH ?= torch==2.13.0
CPU_BUILDS ?= https://download.pytorch.org/whl/cpu

pip := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet
# Installs this package with what requirements/NAME.txt has, or with an extra: $(call install,NAME,EXTRA)
install = $(if $(LOCKED),$(pip) --require-hashes --no-deps --requirement requirements/$(1).txt && \
	$(pip) --no-deps --no-build-isolation --editable .,$(pip) --editable ".[$(2)]")
in_venv := PATH="$(abspath $(VENV))/bin:$$PATH"

.PHONY: run test test-all docs bench-readme
run: $(VENV)/.for-runs
	$(in_venv) python main.py fit --config gpt.yaml $(ARGS)

test: $(VENV)/.for-tests
	$(in_venv) pytest -q -n 3 $(ARGS)

test-all: $(VENV)/.for-tests
	$(in_venv) pytest -q -n 3 -m "slow or not slow" $(ARGS)

# The site of docs/, in docs/_build/html.
docs: $(VENV)/.for-docs
	$(in_venv) sphinx-build -q -W --keep-going -b html docs docs/_build/html $(ARGS)

bench-readme: $(VENV)/.for-tests
	$(in_venv) python -m benchmarks readme $(ARGS)

$(VENV)/.for-runs: pyproject.toml $(VENV)/.torch
	$(call install,run,plots)
	@touch $@

$(VENV)/.for-tests: pyproject.toml $(VENV)/.torch
	$(call install,test,dev)
	@touch $@

# Without what a run needs: the pages are not imported from.
$(VENV)/.for-docs: pyproject.toml $(VENV)/bin/python
	$(pip) $$($(VENV)/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

# Torch alone comes from the index of CPU builds; where that cannot be reached, from pip's own, which holds larger ones.
$(VENV)/.torch: $(VENV)/bin/python
	@if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then \
		echo "installing $(TORCH) with CUDA: this machine has an NVIDIA driver"; \
		$(pip) "$(TORCH)"; \
	else \
		echo "installing $(TORCH) for the CPU: this machine has no NVIDIA driver"; \
		$(pip) --no-deps --retries 1 --timeout 30 --extra-index-url $(CPU_BUILDS) "$(TORCH)"; \
	fi
	@touch $@

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is missing or older than 3.11; name another one: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "$(PYTHON) cannot make virtual environments; install them first: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One entry for people and CI. `make help` lists the targets.
SHELL := bash

# PYTHON=... names the interpreter; else the first of these that pyproject.toml admits.
ADMITTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))
ifeq ($(origin PYTHON),undefined)
    PYTHON := $(or $(shell for py in python3 python3.12 python3.11 python3.10; do \
        $$py -c '$(ADMITTED)' 2>/dev/null && echo $$py && break; done),python3)
endif

# Tests start a thousand processes, and each would compile the tree again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PY := $(VENV)/bin/python
# Debian 12 brings pip 23.0.1, which resolves the lock in 56 s of CPU where 26.3 takes 22.
PIP_RELEASE := pip>=24.1,<27
PIP := $(PY) -m pip --quiet --quiet --disable-pip-version-check --no-input
WORKERS ?= 2
TEST_OPTIONS = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
BUDGET_MINUTES = $(if $(ONLY),6,25)
# PyTorch without CUDA, which no other index has. 1 alone: some systems set CPU to the processor's name.
CPU_BUILD := $(if $(filter 1,$(CPU)),--extra-index-url https://download.pytorch.org/whl/cpu)
TORCH := $(shell sed -nE 's/^ *"(torch==[^"]+)".*/\1/p' pyproject.toml)
PYTAG := $(shell for py in "$(PY)" "$(PYTHON)"; do \
    "$$py" -c 'import sys; print("py%d%d" % sys.version_info[:2])' 2>/dev/null && break; done)
# A lock holds for the Python it was resolved for; another one gets the ranges of pyproject.toml.
LOCK := constraints-$(PYTAG).txt
CONSTRAINTS := $(wildcard $(LOCK))
INSTALLED := $(VENV)/.installed
INSTALLING := $(VENV)/.installing

.PHONY: help install demo gpu gpu-check real test oracles nightly test-pythons test-megatron test-transformers-5 bridge durations rehearsals lint docs golden lock audit sbom clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 20

install: $(INSTALLED)  ## install into .venv, as every target does that needs it; CPU=1 for PyTorch without CUDA

demo: $(INSTALLED)  ## train the tiny ladder on this machine, evaluate it and write its report
	@$(VENV)/bin/longhaul run --ladder tiny --executor local --out runs/tiny

# pip by itself compiles the extension against another torch. CPATH has headers that no toolkit has; ninja, which
# compiles on all cores, is looked for on PATH. Not NVTE_PYTORCH_FORCE_BUILD: it builds twice, and the second fails.
# What was compiled before, against another torch, goes first: pip would keep it, or take it from its cache.
GPU_SOFTWARE := $(PY) -W ignore -m slurm.preflight.node.gpu_software
gpu: $(INSTALLED)  ## install Transformer Engine for GPUs of CUDA 13: compile it against this torch
	@$(GPU_SOFTWARE) links; if $(GPU_SOFTWARE) loaded 2>/dev/null; then \
	    echo "Transformer Engine is installed already, and loads with this torch."; exit; fi; \
	$(GPU_SOFTWARE) build && \
	echo "Compiling Transformer Engine's extension: 15 minutes of one core, and 3 GB of memory for each core ..." && \
	$(PIP) uninstall --yes transformer-engine-torch transformer-engine-cu12 && \
	$(PIP) install $(CONSTRAINTS:%=-c %) wheel ninja pybind11 && \
	PATH="$(abspath $(VENV))/bin:$$PATH" NVTE_FRAMEWORK=pytorch \
	    CPATH="$$($(GPU_SOFTWARE) headers)$${CPATH:+:$$CPATH}" \
	    $(PIP) install --no-build-isolation --no-cache-dir $(CONSTRAINTS:%=-c %) -e '.[gpu]' && \
	$(GPU_SOFTWARE) links && $(GPU_SOFTWARE) loaded && \
	echo "Transformer Engine is installed, and loads with this torch."

# Not of the suite: an environment of 7 GB with CUDA's packages, kept in .pythons for the next time.
gpu-check:  ## check the CUDA path without a GPU: recipes, kernels, process groups; result in gpu_check.md
	@$(MAKE) --no-print-directory VENV=.pythons/gpu gpu
	@.pythons/gpu/bin/python -W ignore -m benchmarks.gpu_check --out $(or $(OUT),gpu_check.md)

# The steps are the commands of docs/real_model.md; one whose result is there is not run again.
real: $(INSTALLED)  ## take SmolLM2-135M from 8K to 16K tokens on two CPU cores, in about 40 minutes
	@$(PY) -m examples.real_model.steps

# A file's tests stay with one worker and share what they trained (tests/suite_time.py).
test: $(INSTALLED)  ## run the tests, on WORKERS=2 processes; ONLY='not slow' for a quarter of the time
	@OMP_NUM_THREADS=1 $(PY) -m pytest $(TEST_OPTIONS) --budget-minutes $(BUDGET_MINUTES) $(if $(ONLY),-m '$(ONLY)')

# Not of the suite: the base is run too, once for each commit, in .oracles. Nothing is installed: both trees
# are compared in the environment that is there.
oracles:  ## compare recipes, plans, stores and messages with a base commit; ALL=1 for training too
	@$(PY) -m tests.oracles $(if $(ALL),--all) $(if $(BASE),--base $(BASE)) $(ONLY)

nightly: $(INSTALLED)  ## run the further cases that make test leaves out, in about an hour
	@OMP_NUM_THREADS=1 $(PY) -m pytest $(TEST_OPTIONS) --nightly -m nightly

# Not of the suite: an environment of 3 to 7 GB for each Python, kept in .pythons for the next time.
test-pythons:  ## dry run, training and fast tests on each Python of this machine, or on PYTHONS='A B'
	@$(PYTHON) -m tests.every_python $(PYTHONS)

# Not of the suite: transformers 5 and what it needs, which this project's own packages exclude; torch is that of VENV.
VERSION_5 := .pythons/transformers-5
$(VERSION_5)/.installed: $(INSTALLED)
	@$(PY) -m venv --clear $(VERSION_5)
	@$(VERSION_5)/bin/python -m pip --quiet --disable-pip-version-check install 'transformers>=5,<6' 'numpy<2'
	@shared=$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
	    echo "$$shared" > "$$($(VERSION_5)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
	@touch $@

test-transformers-5: $(VERSION_5)/.installed  ## compare the rotation of exports with transformers 5 (0.5 GB, in .pythons)
	@TRANSFORMERS_5=$(abspath $(VERSION_5))/bin/python $(PY) -m pytest --quiet -n 0 \
	    tests/recipes/hugging_face/test_rope_parameters.py

# Not of the suite: an environment of 2 to 5 GB for all releases and of 20 MB for each, kept in .pythons.
MEGATRON_WORDS = $(if $(filter command,$(firstword $(origin PYTHON))),--python $(PYTHON)) \
    $(if $(ONLY),--only '$(ONLY)') $(if $(OUT),--out $(OUT)) $(if $(filter first,$(CASES)),--first-cases)
test-megatron: $(INSTALLED)  ## tests of custom_modules on other Megatron-Core: VERSION='0.17 0.18 0.19'
	@$(PY) -m tests.every_megatron $(or $(VERSION),"") $(MEGATRON_WORDS)

bridge: $(INSTALLED)  ## build recipes with Megatron-Bridge: RECIPES='llama3_8b_nemo_16k tiny_512'
	@$(PY) -m tests.every_megatron $(MEGATRON_WORDS) --bridge $(or $(RECIPES),llama3_8b_nemo_16k tiny_512)

durations: $(INSTALLED)  ## run every test and record the seconds of each file in tests/durations.json
	@OMP_NUM_THREADS=1 $(PY) -m pytest $(TEST_OPTIONS) --write-durations

rehearsals: $(INSTALLED)  ## rehearse a recipe of each ladder and family, a line for each; OUT=FOLDER keeps them
	@$(PY) -m tests.longhaul.support.rehearsed_rows $(if $(OUT),--out $(OUT))

lint: $(INSTALLED)  ## format, lint, types, spelling, shell and the rules of the tree
	@$(VENV)/bin/ruff format --check --quiet .
	@$(VENV)/bin/ruff check --quiet .
	@$(VENV)/bin/mypy --no-error-summary
	@$(VENV)/bin/codespell
	@$(VENV)/bin/shellcheck .ci/run slurm/*.sbatch slurm/container/*.sh benchmarks/gpu/rental/*.sh
	@$(VENV)/bin/hadolint -c slurm/container/hadolint.yaml slurm/container/Dockerfile
	@$(PY) -m pytest --quiet tests/house/test_tree.py

# NO_MKDOCS_2_WARNING leaves out the theme's notice of its successor. With --quiet MkDocs counts no
# warnings, and the build would not be strict.
docs: $(INSTALLED)  ## build the site of docs/ in site/; its search needs: python -m http.server -d site
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build

golden: $(INSTALLED)  ## rewrite the golden files; read the diff before committing it
	@$(PY) -m tests.golden.rewrite

# Without CUDA's packages, whose versions are the torch build's own, and without its local label (+cpu).
# A lock is for every release of its Python: tests/house/test_tree.py says which line needs a newer one.
lock: $(INSTALLED)  ## write the installed versions to the lock of this Python
	@set -o pipefail; $(PIP) freeze --all --exclude pip --exclude-editable \
	    | sed -E '/ @ |^cuda-|^triton=|^nvidia-(cu|nccl|nvjitlink|nvshmem|nvtx)/d; s/\+[a-z0-9.]+$$//' > $(LOCK).part
	@mv $(LOCK).part $(LOCK)
	@touch $(INSTALLED)

# Programs of their own environment: what they depend on is none of the lock's.
AUDIT := .pythons/audit
AUDIT_PROGRAMS := pip-audit==2.10.1 cyclonedx-bom==7.5.0
$(AUDIT)/.installed:
	@"$(PYTHON)" -m venv --clear $(AUDIT)
	@$(AUDIT)/bin/python -m pip --quiet --disable-pip-version-check install $(AUDIT_PROGRAMS)
	@touch $@

audit: $(INSTALLED) $(AUDIT)/.installed  ## ask for known vulnerabilities of the locks that docs/security.md does not answer
	@$(PY) -m tests.house.audit $(AUDIT)/bin/pip-audit

sbom: $(AUDIT)/.installed  ## write a bill of materials of each lock to build/sbom (CycloneDX, JSON)
	@mkdir -p build/sbom
	@for lock in $(wildcard constraints-py*.txt); do \
	    $(AUDIT)/bin/cyclonedx-py requirements --of JSON --output-reproducible --pyproject pyproject.toml \
	        -o build/sbom/.part $$lock && mv build/sbom/.part build/sbom/$$(basename $$lock .txt).cdx.json \
	        || exit 1; done; ls build/sbom

clean:  ## remove what builds and tests leave behind; keep the environment, stores and runs
	@rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -not -path './.pythons/*' -prune -exec rm -rf {} +

# The stamp is written last. INSTALLING marks an environment whose first install has not ended; the next
# one begins anew, since pip takes a package for installed when its metadata is there, whatever else is missing.
# pip would compile before it ends, on one core; this does on all, after the end, and yields to what runs. A module
# that is imported before its turn is compiled then.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@if [ -e $(INSTALLING) ] || ! [ -x $(VENV)/bin/pip ]; then \
	    "$(PYTHON)" -c '$(ADMITTED)' || { \
	        echo "Longhaul needs Python 3.10, 3.11 or 3.12; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)." \
	            "Name one, as in: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }; \
	    "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	        version=$$("$(PYTHON)" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	        echo "$(PYTHON) (Python $$version) cannot make virtual environments: its package venv is" \
	            "not installed; on Debian and Ubuntu: sudo apt install python$$version-venv" >&2; exit 1; }; \
	    echo "Installing into $(VENV): 3 to 10 minutes and 3 GB (more where torch comes with CUDA) ..."; \
	    mkdir -p "$$(dirname $(VENV))" && "$(PYTHON)" -m venv --clear $(VENV) && touch $(INSTALLING) && \
	    { $(PIP) install --upgrade '$(PIP_RELEASE)' || \
	        echo "pip could not be brought up to date ($(PIP_RELEASE)); going on with the one of $(PYTHON)." >&2; } || exit 1; \
	else echo "Bringing $(VENV) up to date with pyproject.toml ..."; fi
	@echo "1 of 2: $(TORCH)"
	@$(PIP) install --no-compile $(CONSTRAINTS:%=-c %) $(CPU_BUILD) $(TORCH)
	@echo "2 of 2: NeMo, Megatron-Core and the other packages"
	@$(PIP) install --no-compile $(CONSTRAINTS:%=-c %) -e '.[dev]'
	@nohup nice -n 19 $(PY) -W ignore -m compileall -qq -j 0 $(VENV)/lib >/dev/null 2>&1 </dev/null &
	@rm -f $(INSTALLING)
	@touch $@
	@echo "Installed: $(VENV)/bin/longhaul, or longhaul after: source $(VENV)/bin/activate"

# Everything a visitor needs. `make` alone explains the targets.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup bench report bench-engine train train-measure parity parity-vllm test test-fast check docs reproduce

help: ## explain the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with exact versions; does nothing when it is up to date

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

bench: setup ## compare the drafters on the default model (minutes); table, figures and a page in results/quick
	$(RUN) -m specbench experiment=quick
	@$(RUN) scripts/make_tables.py results/quick --out results/quick
	@$(RUN) scripts/make_figures.py results/quick --out results/quick
	@$(RUN) -m specbench.report results/quick --out results/quick/report.html

report: setup ## a page for any browser of the runs in results/quick, or in runs=FOLDER, as results/report.html
	$(RUN) -m specbench.report $(or $(runs),results/quick) --out results/report.html

TRAINED := results/training/SmolLM2-135M-Instruct

train: setup ## train six drafters of the default model anew, on the data that come with it, on equal terms (hours; goes on where it was)
	$(RUN) scripts/train_all.py experiment=train_default --out $(TRAINED)

train-measure: setup ## measure the drafters that come with the default model; tables and figure in results/trained (25 minutes)
	$(RUN) -m specbench experiment=trained
	$(RUN) -m specbench experiment=trained sampling=t1
	@$(RUN) scripts/training_report.py results/trained --cards drafters/pretrained/smollm2 --out results/trained

bench-engine: setup .venv-vllm/.ready .venv-openvino/.ready ## plain decoding against other engines (half an hour, 4 GB of packages)
	$(RUN) scripts/bench_engine.py --vllm .venv-vllm/bin/python --openvino .venv-openvino/bin/python

.venv-vllm/.ready: scripts/peers/vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --requirement scripts/peers/vllm.txt
	@# its media packages are built for another torch than its own, and text needs none of them
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.venv-openvino/.ready: scripts/peers/openvino.txt
	$(PYTHON) -m venv .venv-openvino
	.venv-openvino/bin/python -m pip install --quiet --disable-pip-version-check --requirement scripts/peers/openvino.txt
	@touch $@

parity: setup .venv-parity/.ready ## our networks against speculators' and dflash's (minutes, 2 GB of packages); table in results/parity
	$(RUN) scripts/parity/networks.py --python .venv-parity/bin/python

parity-vllm: setup .venv-vllm/.ready ## heads we export, drafting in vLLM's CPU build and here (half an hour at first); table in results/parity
	$(RUN) scripts/parity/compare_vllm.py --vllm .venv-vllm/bin/python

.venv-parity/.ready: scripts/parity/requirements.txt scripts/parity/requirements-no-deps.txt
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check --requirement scripts/parity/requirements.txt
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --requirement scripts/parity/requirements-no-deps.txt
	@touch $@

# tests compute on one thread each; four processes fit into 16 GiB
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist worksteal

test: setup ## all tests, on tiny models and on the default model
	$(RUN) -m pytest $(SIDE_BY_SIDE)

test-fast: setup ## the tests on tiny random models only: no download
	$(RUN) -m pytest $(SIDE_BY_SIDE) -m 'not slow and not gpu'

check: setup ## lint, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: setup $(VENV)/.docs ## the documentation as a site, links checked; open site/index.html
	@# not --quiet, which would hide from --strict the warnings that it counts
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

$(VENV)/.docs: $(READY)
	$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	@touch $@

reproduce: setup ## the tables and figures of README and docs from scratch, into results/reproduce (under 90 minutes; quick=1: a quarter of an hour)
	$(RUN) scripts/reproduce.py $(if $(quick),--quick)

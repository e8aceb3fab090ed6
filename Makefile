# The project's own commands. `make` or `make help` lists them.
.DEFAULT_GOAL := help
.PHONY: help install train plan test slow lint kernels bench peers paper families mutants gpu wheel

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-9s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: ## the package with what its developers need, editable
	pip install -e ".[dev]"

train: ## a small OLMoE in mode sonar, on whatever is here
	python experiments/run.py model=olmoe mode=sonar

plan: ## which mode of OLMoE-1B-7B fits which card, without a GPU
	python experiments/plan.py model=olmoe

test: ## the default tests: no GPU, no network
	pytest

slow: ## the slow tests
	pytest -m slow

lint: ## style and types
	ruff check .
	ruff format --check .
	pyright

kernels: ## compile the kernels for GPUs that need not be there, and count
	python experiments/kernel_report.py

bench: ## step times of the modes on this CPU
	python experiments/bench.py

peers: ## this project and its peers side by side, on this CPU
	python experiments/bench_peers.py

paper: ## the paper's comparison at a size that two cores hold, with its report
	python experiments/run.py -m experiment=paper_small

families: ## which families of transformers train, as a table
	python experiments/families.py

mutants: ## break the code in many places, and see a test fail each time
	python tests/mutants.py

gpu: ## everything that a GPU can show
	python experiments/gpu_check.py

wheel: ## build the wheel
	python -m build --wheel

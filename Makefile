PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# One thread a worker: two workers with a thread pool each would fight for the cores.
ENV := OMP_NUM_THREADS=1
PYTEST := $(ENV) $(BIN)/python -m pytest tests

.PHONY: help test lint demo gpu sanitize env format clean
help:
	@echo "make test    lint, then every test that this machine can run"
	@echo "make demo    PPO on CartPole-v1, a learning curve in out/"
	@echo "make gpu     the tests that need a CUDA GPU"
	@echo "make sanitize  every kernel under compute-sanitizer, on a CUDA GPU"
	@echo "make format  sort imports, fix what ruff can fix, format"
	@echo "make clean   remove the environment, caches and outputs"

env: $(STAMP)

$(STAMP): requirements/dev.txt pyproject.toml
	@echo "==> creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "requirements/dev.txt needs Python 3.11 or newer")'
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "==> installing requirements/dev.txt (torch is large, the first time takes minutes)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/dev.txt
	@echo "==> installing rl_triton_td in editable mode"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

lint: $(STAMP)
	@echo "==> ruff"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

test: lint
	@echo "==> tests"
	@$(PYTEST) -n 2
	@echo "==> tests of the kernels in Triton's interpreter"
	@TRITON_INTERPRET=1 $(PYTEST) -n 2 -m interpret

demo: $(STAMP)
	@$(ENV) RL_LOGGING_LEVEL=WARNING $(BIN)/python examples/ppo_cartpole.py

gpu: $(STAMP)
	@$(PYTEST) -m "gpu or gpu_perf"

sanitize: $(STAMP)
	@PYTHONPATH=. compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python tests/every_kernel.py
	@PYTHONPATH=. compute-sanitizer --tool racecheck --error-exitcode 1 $(BIN)/python tests/every_kernel.py

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist out *.egg-info .pytest_cache .ruff_cache .hypothesis
	find rl_triton_td tests examples -name __pycache__ -type d -prune -exec rm -rf {} +

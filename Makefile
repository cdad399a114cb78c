# make setup   a .venv with everything, from nothing but Python 3.11 or newer and pip; safe to repeat
# make test    all tests (about 6 minutes on 2 cores)
# make lint    ruff and mypy
# make bench   every benchmark; figures are kept under results/
PYTHON ?= python3
BIN := .venv/bin
SOURCES := src tests benchmarks

.PHONY: setup test lint bench clean

setup: .venv/ready

.venv/ready: pyproject.toml
	@echo "Setting up .venv (about 3 minutes the first time: torch is large)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m benchmarks.bytes_on_the_wire
	$(BIN)/python -m benchmarks.sample_state
	$(BIN)/python -m benchmarks.loss_kernel --largest
	$(BIN)/python -m benchmarks.data_lookup
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.data_get
	$(BIN)/python -m benchmarks.objective_share
	$(BIN)/python -m benchmarks.checkpoint_save
	$(BIN)/python -m benchmarks.training_speed
	$(BIN)/python -m benchmarks.kills
	$(BIN)/python -m benchmarks.retrieval

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

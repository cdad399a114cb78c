# make demo    train a model on a CPU, with scores, a report and searches (6 minutes on 2 cores, and 3 to install)
# make setup   a .venv with everything, from Python 3.11 or newer and pip alone; safe to repeat
# make check   lint and all tests not marked slow (90 seconds)
# make test    all tests except the browser's (9 minutes on 2 cores)
# make test-page   the demo page in a real browser; installs Debian's Chromium if there is none
# make lint    ruff, mypy, and the direction of imports
# make docs    fill the tables of README.md and docs/ that repeat results/
# make study NAME=batch-32   one of studies/*.yaml, from its pairs to its tables (20 minutes to 1.5 hours on 2 cores)
# make bench   every benchmark; figures go to results/
# make fuzz    damaged and hostile files for every reader, for SECONDS=600; writes results/fuzz.json
# make gpu     an hour's programme for one or two GPUs: right, robust and fast there? writes results/gpu.json
PYTHON ?= python3
BIN := .venv/bin
SOURCES := src tests benchmarks examples

.PHONY: demo setup check test test-page lint docs study bench fuzz gpu clean

demo: setup
	@$(BIN)/python -m fastclip.tour

setup: .venv/ready

.venv/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is required: make $(MAKECMDGOALS) PYTHON=python3.12")'
	@echo "Setting up .venv (about 3 minutes the first time: torch is large)"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	@touch $@

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test-page: setup
	@command -v chromium >/dev/null || { echo "Installing Chromium for the page tests"; \
	  as_root=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	  $$as_root apt-get -qq update && $$as_root apt-get -qq install --yes --no-install-recommends chromium >/dev/null; }
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m page tests/tools/demo

check: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not page"

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: setup
	$(BIN)/python -m benchmarks.write_docs

study: setup
	@test -f "studies/$(NAME).yaml" || { echo "Which study? make study NAME=$$(ls studies/*.yaml | sed 's:.*/::; s:\.yaml::' | paste -sd '|')"; exit 1; }
	$(BIN)/fastclip data get emoji
	$(BIN)/fastclip compare --study studies/$(NAME).yaml
	$(BIN)/python -m benchmarks.study $(NAME)

bench: setup
	$(BIN)/python -m benchmarks.bytes_on_the_wire
	$(BIN)/python -m benchmarks.sample_state
	$(BIN)/python -m benchmarks.loss_kernel --largest
	$(BIN)/python -m benchmarks.data_lookup
	$(BIN)/python -m benchmarks.indexing
	$(BIN)/python -m benchmarks.decode
	$(BIN)/python -m benchmarks.loader_memory
	$(BIN)/python -m benchmarks.data_get
	$(BIN)/python -m benchmarks.objective_share
	$(BIN)/python -m benchmarks.checkpoint_save
	$(BIN)/python -m benchmarks.checkpoint_digest
	$(BIN)/python -m benchmarks.training_speed
	$(BIN)/python -m benchmarks.unpadded_text
	$(BIN)/python -m benchmarks.end_to_end
	$(BIN)/python -m benchmarks.lora
	$(BIN)/python -m benchmarks.hostile
	$(BIN)/python -m benchmarks.step_overhead
	$(BIN)/python -m benchmarks.retrieval
	$(BIN)/python -m benchmarks.start_up
	$(BIN)/python -m benchmarks.plan_fit
	$(BIN)/python -m benchmarks.cut_link
	$(BIN)/python -m benchmarks.hosts

fuzz: setup
	$(BIN)/python -c "import atheris" 2>/dev/null || $(BIN)/pip install --quiet --editable ".[fuzz]"
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz --seconds $(or $(SECONDS),600)

gpu: setup
	$(BIN)/python -m benchmarks.gpu

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache

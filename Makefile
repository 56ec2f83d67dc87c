# Two commands do everything: `make demo` and `make test`. Both build the environment in .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := out
# Where it is set, every process that tests start would compile torch and all else again: 12 CPU seconds each time.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo browser test test-all test-executor test-ullage test-planner test-others lint mutation fuzz torture bench device-bundle docs clean

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/ready
	@mkdir -p $(OUT)
	$(BIN)/ullage plan --model opt-13b --gpus 8 --hardware a100-80 --output $(OUT)/opt-13b.json
	$(BIN)/ullage calibrate --quick --output $(OUT)/this-machine.json
	$(BIN)/ullage plan --model demo-llama --hardware $(OUT)/this-machine.json --memory device=180MB \
		--micro-batch 2 --seq-len 256 --output $(OUT)/demo.json
	$(BIN)/ullage execute $(OUT)/demo.json --iterations 40 --output-dir $(OUT)

# Reports and the page are tested in a browser: Debian's, where root may install it.
browser:
	@[ -z "$$ULLAGE_BROWSER" ] || exit 0; \
	for name in chromium-headless-shell chromium chromium-browser google-chrome; do \
		! command -v $$name > /dev/null || exit 0; done; \
	[ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null \
		|| { apt-get update -qq && apt-get install -qq --yes chromium > /dev/null && exit 0; }; \
	echo "make: there is no browser, so tests of reports and of the page are skipped; install chromium, or name one in ULLAGE_BROWSER"

test: $(VENV)/ready browser
	$(BIN)/python -m pytest $(TIMED)
	$(MAKE) --no-print-directory --keep-going --jobs 5 $(PARTS) lint

# All parts at once: threads and ranks that hand work to each other leave cores idle. They wait much longer for a core
# than for the work, if other parts compute. So those parts come first, and the others get the time that they leave.
# What compares times of threads within 5 % runs before, alone, where it allows for no waiting.
TIMED := tests/ullage/test_agreement.py
# Each part imports torch and all else once, and so does what it forks from: so there are few.
PARTS := test-executor test-ullage test-planner test-others
test-executor:
	$(BIN)/python -m pytest tests/executor tests/weights tests/benchmarks tests/hwprofiles tests/calibrate
test-ullage:
	nice -n 5 $(BIN)/python -m pytest tests/ullage tests/checkpoint --ignore=$(TIMED)
test-planner:
	nice -n 19 $(BIN)/python -m pytest tests/planner
test-others:
	nice -n 19 $(BIN)/python -m pytest tests $(patsubst %,--ignore=tests/%,executor weights benchmarks hwprofiles calibrate ullage checkpoint planner)
lint:
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	nice -n 19 $(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# Everything that tests can try; `make test` tries a part of every property and every table (tests/amount.py).
test-all:
	ULLAGE_TESTS=all $(MAKE) --no-print-directory test

# Property tests only, with examples that were never tried before.
ROUNDS ?= 10
fuzz: $(VENV)/ready
	for round in $$(seq $(ROUNDS)); do \
		ULLAGE_TESTS=all $(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile=fuzz || exit 1; \
	done

# Checkpoints: every kill point, every lost write, every failing operation. Ranks: every optimizer for long.
torture: $(VENV)/ready
	ULLAGE_TESTS=all $(BIN)/python -m pytest -q -m torture

# Deliberate defects of all packages, one after the other: a test has to fail for each.
mutation: $(VENV)/ready
	$(BIN)/python tests/mutation/run.py

bench: $(VENV)/ready
	$(BIN)/python benchmarks/simulator/run.py
	$(BIN)/python benchmarks/cpu/adamw.py
	$(BIN)/python benchmarks/cpu/peers.py

# What a machine with a GPU and no network lacks, for benchmarks/gpu/run.sh there: in device, which git ignores.
device-bundle: $(VENV)/ready
	$(BIN)/python benchmarks/gpu/bundle.py

# The site of the documentation, in out/site; warnings are errors.
docs: $(VENV)/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) $(OUT) .mypy_cache .ruff_cache .pytest_cache .hypothesis

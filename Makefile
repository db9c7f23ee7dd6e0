# Every target creates .venv if it is missing.
PYTHON ?= python3
VENV := .venv
OLDEST := build/oldest
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
# Python compiles what it imports; compiling all that is installed would take as long as the rest of the installation.
PIP := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile
# Compiled files are kept, also where the environment forbids it: otherwise each process would compile what it imports.
RUN := HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python

.PHONY: demo test test-all test-browser test-devices test-oldest test-transformers test-peers soak bad-input lint format bench site docs notebooks package

demo: $(DEMO)  ## train, save, load and use a spherized LeNet-5 on the bundled digits
	OMP_NUM_THREADS=1 $(RUN) examples/demo.py

test: $(READY)  ## run every test function with a few cases, without network, on all cores
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal $(CASES)
	$(MAKE) test-devices CASES="$(CASES)"

test-all: CASES := --all-cases
test-all: test  ## run every case of each test function, before a release

test-devices: $(READY)  ## run the tests of accelerators, on a CUDA device or a test device that computes on the CPU
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist worksteal $(CASES) tests/devices

test-browser: $(READY)  ## open every page of the documentation in Chromium, in a wide and a narrow window
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n0 tests/browser

test-oldest:  ## run the quick part of the tests with the oldest allowed versions of all dependencies, in build/oldest
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct -e ".[test,trackers]"
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n auto --dist worksteal -m "not slow" \
		$(addprefix --ignore=tests/,benchmarks docs hub recipes)

test-transformers: $(READY)  ## run the common tests of transformers on our models; downloads them once
	tests=$$($(VENV)/bin/python tests/peers/fetch.py transformers) && PYTHONPATH=$$tests $(RUN) -m pytest \
		-o addopts=-ra -W ignore::pytest.PytestUnknownMarkWarning tests/transformers_common/encoders.py \
		tests/transformers_common/vision.py

test-peers: $(READY)  ## run the tests of scipy, torch, transformers and others on our code; downloads some once
	tests=$$($(VENV)/bin/python tests/peers/fetch.py timm transformers) && \
		PYTHONPATH=$$tests OMP_NUM_THREADS=1 $(RUN) -m pytest --all-cases -o addopts=-ra -W ignore::pytest.PytestUnknownMarkWarning \
		$(filter-out %/conftest.py %/fetch.py,$(wildcard tests/peers/*.py))

soak: $(READY)  ## kill training runs for MINUTES, resume them, and compare the results; prints the counts
	$(RUN) tests/recipes/soak.py --minutes $(or $(MINUTES),10)

bad-input: $(READY)  ## call commands and public functions with bad input, the commands for MINUTES; prints the counts
	$(RUN) tests/recipes/bad_input.py --minutes $(or $(MINUTES),10)
	OMP_NUM_THREADS=1 $(RUN) tests/recipes/bad_arguments.py

lint: $(READY)  ## check style and types, and that the tables are what the results files say
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --strict examples/typed.py
	$(RUN) benchmarks/report.py --check

format: $(READY)  ## format the code
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(READY)  ## run the benchmarks; prints tables, writes JSON to benchmarks/results
	$(RUN) benchmarks/spherization.py
	$(RUN) benchmarks/spherization_settings.py
	$(RUN) benchmarks/runtimes.py
	$(RUN) benchmarks/image_training.py
	$(RUN) benchmarks/fast_cifar10.py
	$(RUN) benchmarks/optimizers.py
	$(RUN) benchmarks/prototypes.py
	$(RUN) benchmarks/vmf.py
	$(RUN) benchmarks/vmf_accuracy.py
	$(RUN) benchmarks/head_costs.py
	$(RUN) benchmarks/kernel_counts.py
	$(RUN) benchmarks/clustering.py
	$(RUN) benchmarks/ood.py
	$(RUN) benchmarks/retrieval.py
	$(RUN) benchmarks/search.py
	$(RUN) benchmarks/analogy.py
	$(RUN) benchmarks/projections.py
	$(RUN) benchmarks/angular.py
	$(RUN) benchmarks/few_shot.py
	$(RUN) benchmarks/interactive_sphere.py
	$(RUN) benchmarks/import_time.py

site: $(READY)  ## build the documentation into build/site, without running its code: a minute
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	@echo "To read it: $(VENV)/bin/python -m http.server --directory build/site"

docs: $(READY)  ## run the code of the documentation, build it into build/site and check its links
	$(RUN) docs/_tools/code_blocks.py
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict
	$(RUN) docs/_tools/check_links.py build/site
	@echo "To read it: $(VENV)/bin/python -m http.server --directory build/site"

notebooks: $(READY)  ## run the notebooks, at most five minutes each; notebooks/run.py --write stores their outputs
	$(RUN) notebooks/run.py

package:  ## build the wheel and the sdist, install the wheel in a new environment, and use it outside the repository
	bash .ci/package.sh $(PYTHON)

$(DEMO): pyproject.toml
	@echo "Setting up $(VENV): PyTorch and the Hugging Face libraries, some 6 GB, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[plots]"
	@touch $(DEMO)

$(READY): $(DEMO)
	@echo "Installing what tests, documentation and notebooks need, a few minutes"
	$(PIP) -e ".[dev]"
	@touch $(READY)

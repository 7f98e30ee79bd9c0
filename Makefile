# make demo    trains a small network at O0 to O5 and prints the table
# make test    runs the tests
# make bench   measures training steps and optimizer steps, for an hour and a half, on a machine that
#              does nothing else; BENCH_ARGS=--all: more optimizer steps
# make experiments  measures whole training steps there: E1, E2, E4 and E5, twenty minutes
# make docs    builds the documentation into build/docs; DOCS_BUILDER=linkcheck: checks its links to
#              other sites, which needs the network
# make notebooks    runs the notebooks and stores what they show, some minutes; NOTEBOOKS=e2_levels:
#                   that one; NOTEBOOKS=--full: with the sizes that they choose for a CPU
#
# make wheel        builds a wheel with a binding for each release of torch, into dist/;
#                   WHEEL_PYTHONS="python3.12 python3.13": for these Pythons, one each;
#                   WHEEL_ARCH=aarch64: for ARM, by a cross-compiler
# make release      the same and a source distribution, each installed and tried; then checksums
#
# Each does all its own set-up: a virtual environment in .venv, torch, the build. A second call does
# only what changed. To use an environment that has torch already, name its interpreter:
#
#     PYTHON=/path/to/python make demo
#
# Nothing but ampfuse and the packages of its extras (for docs, of a group) is installed there, and
# torch is not touched.
#
# Further variables: DEMO_ARGS, TEST_ARGS, BENCH_ARGS, NOTEBOOKS, WHEEL_ARGS; BASE_PYTHON makes .venv
# (python3); TORCH is what pip installs there instead of the newest release tested, and TORCH_INDEX
# where from (https://download.pytorch.org/whl/cpu has CPU builds); AMPFUSE_CUDA and
# AMPFUSE_CUDA_ARCHS as in docs/building.md.

.DELETE_ON_ERROR:
.PHONY: demo test bench experiments docs notebooks wheel release lint format clean help

# Without a GPU the kernels for one are not compiled: `AMPFUSE_CUDA=ON make test` compiles them.
CUDA_HERE := $(or $(AMPFUSE_CUDA),$(if $(shell nvidia-smi -L 2>/dev/null),AUTO,OFF))
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

BASE_PYTHON ?= python3
TEST_ARGS ?= -n 2 --dist loadfile --no-loadscope-reorder
DOCS_BUILDER ?= html

# What the compiled extension is made of. Python files are not here: the installation in .venv is
# editable and reads them from this folder.
NATIVE := pyproject.toml CMakeLists.txt $(shell find csrc cmake buildtools tests/host_cuda tests/cpp -type f \
            -not -name '*.pyc')

ifdef PYTHON
  PY := $(PYTHON)
  STAMPS := build/make$(subst /,_,$(abspath $(shell command -v $(PYTHON))))
  # A copy is installed there, so Python files matter too.
  SOURCES := $(NATIVE) $(shell find python -name '*.py*' -not -name '*.pyc')
  INSTALL := AMPFUSE_CUDA=$(CUDA_HERE) $(PY) buildtools/install.py
  TARGET := .
  TEST_EXTRAS := test
else
  PY := .venv/bin/python
  STAMPS := .venv
  SOURCES := $(NATIVE)
  INSTALL := AMPFUSE_CUDA=$(CUDA_HERE) $(PY) buildtools/install.py --no-build-isolation
  # The kernels of this machine's instruction set alone, unless the tests have asked for all.
  FOR_DEMO = $(if $(wildcard .venv/test),,-C cmake.define.AMPFUSE_CPU_ISAS=native)
  TARGET := -e .
  TEST_EXTRAS := test,integrations,experiments
endif

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

demo: $(STAMPS)/demo
	$(PY) -m ampfuse demo $(DEMO_ARGS)
	@echo "Next: README.md shows the three lines that change in a training script; make test runs the tests."

# Tests start a hundred processes; without stored bytecode each compiles torch's Python again.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMPS)/test
	$(PY) -m pytest $(TEST_ARGS)

bench: $(STAMPS)/experiments
	$(PY) benchmarks/nets.py
	$(PY) benchmarks/step.py --modes $(BENCH_ARGS)
	$(PY) benchmarks/step.py --host --csv benchmarks/results/host_time_cpu.csv
	$(PY) benchmarks/nets.py --host --csv benchmarks/results/o1_host_cpu.csv
	$(PY) benchmarks/layers.py
	for name in nets step host_time o1_host; do $(PY) benchmarks/report.py benchmarks/results/$${name}_cpu.csv; done

experiments: $(STAMPS)/experiments
	PYTHON=$(PY) benchmarks/experiments.sh

# -W: a warning is an error; -n: so is a name that leads nowhere.
docs: $(STAMPS)/docs
	$(PY) -m sphinx -W -n --keep-going -q -b $(DOCS_BUILDER) -d build/docs.cache docs build/docs

notebooks: $(STAMPS)/notebooks
	$(PY) notebooks/execute.py $(NOTEBOOKS)

wheel: .venv/wheel
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python buildtools/wheel.py $(if $(WHEEL_ARCH),--arch $(WHEEL_ARCH)) $(WHEEL_ARGS) $(WHEEL_PYTHONS)

release: .venv/release
	PATH="$(CURDIR)/.venv/bin:$$PATH" .venv/bin/python buildtools/release.py $(WHEEL_PYTHONS)

CXX_FILES = git ls-files '*.h' '*.cpp' '*.cu' '*.cuh'

# Types are checked against the torch of the tests.
lint: .venv/lint $(STAMPS)/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy --python-executable $(PY)
	PYTHONPATH=python .venv/bin/lint-imports
	$(CXX_FILES) | xargs .venv/bin/clang-format --dry-run -Werror
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	.venv/bin/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	@if command -v actionlint; then actionlint; fi # no registry of Python's has it

format: .venv/lint
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .
	$(CXX_FILES) | xargs .venv/bin/clang-format -i

clean:
	rm -rf build .venv tests/_C_emulated*.so tests/ampfuse_cpp_tests

# ---- set-up, each step once ----------------------------------------------------------------------

.venv/venv:
	$(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	@touch $@

.venv/lint .venv/wheel .venv/release: .venv/venv pyproject.toml
	.venv/bin/python -m pip install --quiet --group $(@F)
	@touch $@

ifdef PYTHON
$(STAMPS)/ready:
	@mkdir -p $(@D)
	@$(PY) buildtools/probe.py > $@
else
.venv/torch: .venv/venv
	$(PY) -m pip install --no-compile $(if $(TORCH),'$(TORCH)',--group torch-newest) torchvision $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	@touch $@

# The build in .venv is not isolated, so that it can go on where the last one stopped: what a build
# needs (a CUDA compiler too, where one is missing) is installed first.
$(STAMPS)/ready: .venv/torch pyproject.toml
	@AMPFUSE_CUDA=$(CUDA_HERE) $(PY) buildtools/probe.py --requirements > $@
	$(PY) -m pip install --quiet --no-compile -r $@
endif

SAY_WHAT_WAS_BUILT = $(PY) -c "from ampfuse import _core; print(_core.build_info.BUILD_INFO)"

$(STAMPS)/demo: $(STAMPS)/ready $(SOURCES)
	@echo "Compiling and installing ampfuse (some minutes the first time) ..."
	@$(INSTALL) $(FOR_DEMO) $(TARGET)'[demo]'
	@$(SAY_WHAT_WAS_BUILT)
	@touch $@

$(STAMPS)/experiments $(STAMPS)/notebooks: $(STAMPS)/demo
	@$(INSTALL) $(TARGET)'[$(@F)]'
	@touch $@

$(STAMPS)/docs: $(STAMPS)/demo
	$(PY) -m pip install --quiet --group docs
	@touch $@

# The tests need the kernels of all instruction sets, and a second module that runs the CUDA kernels
# on the CPU. Tests of the experiments need torchvision: with PYTHON= they are skipped without it.
$(STAMPS)/test: $(STAMPS)/ready $(SOURCES)
	@echo "Compiling and installing ampfuse (some minutes the first time) ..."
	@$(INSTALL) -C cmake.define.AMPFUSE_CPU_ISAS=all -C cmake.define.AMPFUSE_HOST_EMULATION=ON \
	  $(TARGET)'[$(TEST_EXTRAS)]'
	@$(SAY_WHAT_WAS_BUILT)
	@touch $(@D)/demo $@

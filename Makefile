# `make run`    set up everything, then the main job on the embedded model
# `make test`   the same set-up, then the tests
# `make check`  lint, types, quick tests
# also: build, lint, types, sanitize, slow, soak, gpu, carry, test-transformers, lock, clean, distclean. Running any twice is quick.

VENV := .venv
OLDEST_TRANSFORMERS := 5.22.0
GPU_PEERS := build/triton-3.6.0 build/cuda-bindings-13.5.0
PYTHON_VENV := $(VENV)/bin/python
BIN := $(CURDIR)/$(VENV)/bin
PACKAGES := $(VENV)/.packages
NATIVE_SOURCES = $(shell find native -name '*.cpp' -o -name '*.hpp')

.PHONY: run test check build lint types sanitize slow soak gpu carry test-transformers lock clean distclean

run: build
	$(VENV)/bin/kvpool run

test: build $(GPU_PEERS)
	OMP_NUM_THREADS=1 $(PYTHON_VENV) -m pytest -n 2 --dist worksteal -m "not slow and not gpu"

check: lint types build
	OMP_NUM_THREADS=1 $(PYTHON_VENV) -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not model and not long"

# The kernels under the address and undefined-behaviour sanitizers.
sanitize: $(PACKAGES) build/build.ninja
	@$(BIN)/cmake --build build --target native_tests
	build/native_tests

slow: build $(GPU_PEERS)
	$(PYTHON_VENV) -m pytest -m "slow and not gpu"

gpu: build
	$(PYTHON_VENV) -m pytest -m gpu

# What a GPU machine without network lacks, for its Python: `make carry FOR=/path/to/python3.12`.
FOR := $(PYTHON_VENV)
carry: build
	rm -rf build/carried
	$(PYTHON_VENV) tests/gpu/carry build/carried --python $(FOR)

soak: build
	$(PYTHON_VENV) benchmarks/soak.py

# The oldest transformers that pyproject.toml allows, beside the newest, which is installed.
build/transformers-oldest: | $(PACKAGES)
	$(PYTHON_VENV) -m pip install --quiet --no-deps --no-compile --target $@.part transformers==$(OLDEST_TRANSFORMERS)
	mv $@.part $@

# What tests of the GPU backend use beside what is installed; they say what is missing where it cannot be fetched.
$(GPU_PEERS): | $(PACKAGES)
	rm -rf $@.part
	-name=$(@F); $(PYTHON_VENV) -m pip install --quiet --no-compile --target $@.part $${name%-*}==$${name##*-} && mv $@.part $@

test-transformers: build build/transformers-oldest
	PYTHONPATH=src $(PYTHON_VENV) -m pytest -m "not slow" tests/transformers tests/engine
	PYTHONPATH=src:build/transformers-oldest $(PYTHON_VENV) -m pytest -m "not slow" \
	  -W 'ignore:`torch.jit.script` is deprecated:DeprecationWarning' tests/transformers tests/engine

# The stamp is newer than what decides about the packages.
$(PACKAGES): requirements-dev.txt tools/setup.sh
	@PYTHON="$(PYTHON)" sh tools/setup.sh
	@touch $@

build/build.ninja: | $(PACKAGES)
	$(BIN)/cmake -S . -B build -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DPython_EXECUTABLE=$(BIN)/python >build.log \
	  || { cat build.log; rm -f build.log; exit 1; }
	@rm -f build.log

# ninja decides what to compile. A new file replaces the old one: a running process keeps what it has mapped.
build: $(PACKAGES) build/build.ninja
	@$(BIN)/cmake --build build
	@for built in build/_native*.so; do \
	  cmp -s $$built src/kvpool/$$(basename $$built) || { rm -f src/kvpool/_native*.so; cp $$built src/kvpool/; }; done

lint: $(PACKAGES)
	$(PYTHON_VENV) -m ruff check .
	$(PYTHON_VENV) -m ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)

types: $(PACKAGES)
	$(PYTHON_VENV) -m mypy

lock: $(PACKAGES)
	{ grep '^#' requirements-dev.txt; $(PYTHON_VENV) -m pip freeze --exclude kvpool | sed 's/+cpu$$//'; } >requirements-dev.tmp
	mv requirements-dev.tmp requirements-dev.txt

clean:
	rm -rf build dist src/kvpool/_native*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

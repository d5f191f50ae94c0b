# make demo   install into .venv, build the demo engine, generate text with figures
# make test   lint and all tests           make test-full   the long sweeps too
# make build  recompile after a change to C++   make lint   ruff, mypy, clang-format
# make sanitize   the C++ under address and undefined-behaviour sanitizers
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPP := $(shell find plugins runtime -name '*.cpp' -o -name '*.hpp')
# Warnings in our own C++ are errors where they are ours to fix: WERROR=ON in CI.
WERROR ?= OFF
INSTALL := $(PIP) install --quiet --no-build-isolation -C cmake.define.TRTREE_WERROR=$(WERROR)

.PHONY: demo test test-full build lint format sanitize clean

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet 'nanobind>=2.4' ninja 'scikit-build-core>=0.11'
	touch $@

# The package itself, editable: Python changes need no reinstall.
$(VENV)/.installed: $(VENV)/.python pyproject.toml CMakeLists.txt $(CPP)
	$(INSTALL) -e .
	touch $@

# What only the tests need: the oracles, and z-lab's package beside them.
$(VENV)/.oracles: $(VENV)/.installed
	$(INSTALL) -e '.[test,lint,oracle]'
	$(PIP) install --quiet --no-deps dflash==0.1.0
	touch $@

build: $(VENV)/.installed

demo: build
	$(BIN)/python build_engine.py --tree-budget 16 --force
	$(BIN)/python build_engine.py --backend reference --output engines/demo-reference --force > /dev/null
	$(BIN)/python -m trtree.runtime.generate --engine engines/demo --mode tree --prompt "$$(head -n 1 configs/demo/prompts.txt)"
	$(BIN)/python -m trtree.runtime.generate --engine engines/demo --compare configs/demo/prompts.txt --baseline engines/demo-reference

test: $(VENV)/.oracles lint
	$(BIN)/python -m pytest -m 'not full'

test-full: $(VENV)/.oracles lint
	$(BIN)/python -m pytest

# mypy cannot follow an editable install, so it sees the package through links.
lint: $(VENV)/.oracles
	mkdir -p .mypy/trtree
	for part in build plugins runtime; do ln -sfn ../../$$part .mypy/trtree/$$part; done
	$(BIN)/python -m nanobind.stubgen -q -r -m trtree._core -O .mypy/trtree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=.mypy $(BIN)/mypy -p trtree
	$(BIN)/clang-format --dry-run --Werror $(CPP)

# The tests that drive our C++, on an extension built with the address and
# undefined-behaviour sanitizers. -S keeps the editable install out of the way.
SANITIZED := .build/sanitize
SITE = $(shell $(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
sanitize: $(VENV)/.oracles
	cmake -S . -B $(SANITIZED) -G Ninja -DCMAKE_BUILD_TYPE=Release -DTRTREE_SANITIZE=ON \
	  -DSKBUILD_PROJECT_VERSION=sanitized -DPython_EXECUTABLE=$(abspath $(BIN))/python \
	  -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir) > /dev/null
	cmake --build $(SANITIZED)
	mkdir -p $(SANITIZED)/site/trtree
	for part in build plugins runtime; do ln -sfn ../../../../$$part $(SANITIZED)/site/trtree/$$part; done
	cp $(SANITIZED)/_core.*.so $(SANITIZED)/site/trtree/
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=$(SANITIZED)/site:$(SITE) \
	  $(BIN)/python -S -m pytest -p no:cacheprovider tests/plugins/nvfp4_linear tests/plugins/dense_linear \
	  tests/plugins/moe/test_moe_cpu.py tests/runtime/test_moe_engine.py \
	  tests/plugins/test_ddtree.py tests/plugins/test_ddtree_top_k.py tests/runtime/test_row_batch.py \
	  tests/runtime/test_executor.py tests/runtime/test_cpu_bitwise.py \
	  tests/runtime/test_cpu_variants.py tests/runtime/test_engine_contract.py \
	  tests/runtime/test_sampler.py tests/runtime/test_tree_policy.py \
	  tests/runtime/test_executor_memory.py tests/runtime/test_executor_policies.py \
	  tests/runtime/distributed/test_tensor_parallel.py

format: $(VENV)/.oracles
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) .build .mypy .mypy_cache .pytest_cache .ruff_cache

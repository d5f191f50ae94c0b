# make demo   install into .venv, build the demo engine, generate text with figures
# make test   lint and all tests           make test-full   the long sweeps too
# make triton-demo   the demo engine in tritonserver, and docs/triton.md's examples against it
# make build  recompile after a change to C++   make lint   ruff, mypy, clang-format
# make sanitize   the C++ under address and undefined-behaviour sanitizers
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CPP := $(shell find plugins runtime -name '*.cpp' -o -name '*.hpp')
# Warnings in our own C++ are errors where they are ours to fix: WERROR=ON in CI.
WERROR ?= OFF
INSTALL := $(PIP) install --quiet --no-build-isolation --config-settings=cmake.define.TRTREE_WERROR=$(WERROR)

.PHONY: demo triton-demo triton-env test test-full build lint format sanitize clean

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

# A tritonserver for machines without a GPU or a container, in an environment of its own: its
# python backend wants numpy below 2. 120 MB to download, once.
TRITON := .build/triton
PACKAGE := $(shell find build plugins runtime -name '*.py')

$(TRITON)/.server:
	$(PYTHON) -m venv $(TRITON)
	$(TRITON)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
	  nvidia-pytriton==0.7.0 'numpy<2' 'tokenizers>=0.21' 'mpi4py>=4' 'mpich>=5'
	set -e; version=$$($(TRITON)/bin/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  ln -sfn ../../python_backend_stubs/$$version/triton_python_backend_stub \
	  $(TRITON)/lib/python$$version/site-packages/pytriton/tritonserver/backends/python/
	touch $@

# This package as users install it there: the wheel, without torch.
$(TRITON)/.trtree: $(TRITON)/.server $(VENV)/.installed $(PACKAGE)
	rm -rf .build/wheel
	$(PIP) wheel --quiet --no-build-isolation --no-deps --config-settings=cmake.define.TRTREE_WERROR=$(WERROR) \
	  --wheel-dir .build/wheel .
	$(TRITON)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps \
	  --force-reinstall .build/wheel/*.whl
	touch $@

$(VENV)/.triton: $(VENV)/.installed
	$(INSTALL) -e '.[triton]'
	touch $@

triton-env: $(TRITON)/.trtree

triton-demo: $(VENV)/.triton triton-env
	$(BIN)/python build_engine.py --tree-budget 16 --force
	$(BIN)/python tests/support/triton_examples.py $(TRITON) engines/demo/triton

test: $(VENV)/.oracles triton-env lint
	$(BIN)/python -m pytest -m 'not full'

test-full: $(VENV)/.oracles triton-env lint
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
	  tests/plugins/moe/test_moe_cpu.py tests/plugins/tree_attention/test_kv_codes.py \
	  tests/runtime/test_moe_engine.py tests/runtime/test_fp8_kv_engine.py \
	  tests/runtime/test_glm5_engine.py \
	  tests/plugins/test_ddtree.py tests/plugins/test_ddtree_top_k.py tests/runtime/test_row_batch.py \
	  tests/runtime/test_executor.py tests/runtime/test_cpu_bitwise.py \
	  tests/runtime/test_cpu_variants.py tests/runtime/test_engine_contract.py \
	  tests/runtime/test_sampler.py tests/runtime/test_tree_policy.py \
	  tests/runtime/test_executor_memory.py tests/runtime/test_executor_policies.py \
	  tests/runtime/test_state_snapshots.py tests/runtime/test_hybrid_engine.py \
	  tests/runtime/distributed/test_tensor_parallel.py

format: $(VENV)/.oracles
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

clean:
	rm -rf $(VENV) .build .mypy .mypy_cache .pytest_cache .ruff_cache

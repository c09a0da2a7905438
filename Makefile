# Common commands. Everything runs in $(VENV); a target that is up to date does nothing.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
# The first Python that has torch and triton.
GPU_PYTHON ?= $(or $(shell for python in python3 python $(PYTHON) $(VENV)/bin/python; do \
	"$$python" -c 'from importlib.util import find_spec as f; exit(not (f("torch") and f("triton")))' 2>&- \
	&& echo "$$python" && break; done), $(PYTHON))
GPU_PATH := .:protos:kernels
PROMPT ?=
ARGS ?=

# Passed on literally: make must not expand a dollar sign in a prompt, here or in a recipe.
DEMO_PROMPT := $(value PROMPT)
export DEMO_PROMPT
unexport PROMPT

# Tests start hundreds of processes: without bytecode each of them compiles the project anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Two workers on any machine: most tests wait for their own processes, and some measure what these use.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUNTIME_STAMP := $(VENV)/.runtime-stamp
SETUP_STAMP := $(VENV)/.setup-stamp
BUF_VERSION := 1.75.0
BUF := $(VENV)/node/node_modules/.bin/buf
BUF_STAMP := $(VENV)/node/.buf-$(BUF_VERSION)
# Edited C++ is compiled again.
NATIVE := $(wildcard $(foreach folder,. avx2 avx512,kernels/triptych_kernels/cpu/$(folder)/*.cpp kernels/triptych_kernels/cpu/$(folder)/*.h))
# The contract as it was last released: the descriptor set that `make released-protos` writes.
RELEASED := protos/released.binpb
PROTOS := $(sort $(wildcard protos/triptych/*/v1/*.proto))
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
CONTRACT := triptych-contract-$(VERSION)
DIST ?= dist
CODE := triptych_kit coordinator_svc frontend_svc engine_svc triptych_client triptych_cli triptych_conformance kernels benchmarks examples tools tests

.PHONY: help setup demo serve protos released-protos contract format check test test-network test-polyglot test-chaos test-chaos-ipv6 test-compose test-acceptance test-gpu bench-gpu simulate bench up test-emulated house

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(SETUP_STAMP)  ## create $(VENV) and install this project with everything to develop it

$(SETUP_STAMP): pyproject.toml setup.py constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), PyTorch among it: some minutes"
	$(PIP_INSTALL) -e '.[dev]'
	touch $(RUNTIME_STAMP) $@

# The dependencies to run the stack, without those to develop it.
$(RUNTIME_STAMP): pyproject.toml setup.py constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), PyTorch among it: some minutes"
	$(PIP_INSTALL) -e '.[all]'
	touch $@

demo: $(RUNTIME_STAMP)  ## answer one prompt through three processes: make demo PROMPT="..."
	@$(BIN)/triptych demo $(if $(DEMO_PROMPT),--prompt="$$DEMO_PROMPT")

serve: $(RUNTIME_STAMP)  ## run the stack until Ctrl-C: make serve ARGS="MODEL --port 8000"
	$(BIN)/triptych serve $(ARGS)

up:  ## the stack in containers: on the GPUs of this host, or the embedded model without a GPU
	docker compose $(if $(shell nvidia-smi -L 2>/dev/null | grep '^GPU'),,-f docker-compose.cpu.yml) up $(ARGS)

protos: setup  ## regenerate what is derived from the protos: stubs, types, docs/fields.md
	cd protos && ../$(BIN)/python -m grpc_tools.protoc -I . \
		--python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS:protos/%=%)
	$(BIN)/python -m tools.contract_types
	$(BIN)/python tools/rules_doc.py

released-protos: setup $(BUF_STAMP)  ## record the contract of a release: later ones are checked against it
	$(BUF) breaking protos --against $(RELEASED)
	$(BUF) build protos --as-file-descriptor-set --exclude-source-info -o $(RELEASED)

contract: setup $(BUF_STAMP)  ## the contract as files of a release, in dist/: a descriptor set and a buf module
	rm -rf $(DIST)/$(CONTRACT) && mkdir -p $(DIST)
	$(BUF) build --as-file-descriptor-set -o $(DIST)/$(CONTRACT).binpb
	$(BUF) export . -o $(DIST)/$(CONTRACT)
	cp LICENSE protos/README.md protos/engine-session.md $(DIST)/$(CONTRACT)
	printf 'version: v2\nmodules:\n  - path: .\n' > $(DIST)/$(CONTRACT)/buf.yaml
	tar -C $(DIST) -czf $(DIST)/$(CONTRACT).tar.gz $(CONTRACT)
	rm -r $(DIST)/$(CONTRACT)

format: setup  ## format the code and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: setup $(BUF_STAMP)  ## formatting, lint, types, import contracts, architecture, protos
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory -j 2 check-types check-structure

.PHONY: check-types check-structure check-stubs
# On one core for a minute or two.
check-types: setup
	$(BIN)/mypy $(CODE)

check-structure: setup $(BUF_STAMP)
	$(BIN)/lint-imports
	$(BUF) lint
	$(BUF) breaking protos --against $(RELEASED)
	$(MAKE) --no-print-directory check-stubs
	$(PYTEST) -q tests/architecture

check-stubs: setup
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; \
	(cd protos && ../$(BIN)/python -m grpc_tools.protoc -I . \
		--python_out="$$fresh" --pyi_out="$$fresh" --grpc_python_out="$$fresh" $(PROTOS:protos/%=%)); \
	cd "$$fresh" && find . -type f | while read -r stub; do \
		cmp "$$stub" "$(CURDIR)/protos/$$stub" || { echo "stale stub $$stub: run make protos" >&2; exit 1; }; \
	done

$(BUF_STAMP): | $(SETUP_STAMP)
	npm install --prefix $(VENV)/node --no-audit --no-fund --silent @bufbuild/buf@$(BUF_VERSION)
	touch $@

house:  ## report on the shape of the code: large classes and folders, fragments, code lines, prose without a noun
	@$(PYTHON) tools/house.py

test: setup  ## the CPU suite, without what `make check` tests
	$(PYTEST) --ignore=tests/architecture

test-network: setup $(BUF_STAMP)  ## tests that need a package registry
	BUF=$(abspath $(BUF)) $(PYTEST) -m network

# REQUIRE: the languages whose absence is an error; by default all that have a program.
test-polyglot: setup $(BUF_STAMP)  ## clients and a frontend in other languages: make test-polyglot REQUIRE="python node"
	BUF=$(abspath $(BUF)) $(BIN)/python -m pytest -m polyglot -vv -rpsfE tests/polyglot tests/contract $(ARGS)

test-chaos: setup  ## kill, freeze and cut off real services under load: every stream is compared
	$(PYTEST) -m chaos

# Services and rigs take these from the environment.
IPV6_HOSTS := LOOPBACK=::1 $(foreach name,SERVE ENGINE FRONTEND COORDINATOR,TRIPTYCH_$(name)_HOST=::1) \
	$(foreach name,ENGINE FRONTEND COORDINATOR,TRIPTYCH_$(name)_ADMIN_HTTP_HOST=::1)

test-chaos-ipv6: setup  ## the faults on real services in a network of its own that has IPv6 alone
	unshare --map-root-user --net bash -euc 'ip link set lo up; ip -4 addr flush dev lo; \
		ip addr add fd00::2/128 dev lo; exec env $(IPV6_HOSTS) $(PYTEST) -m chaos'

# CONTAINERS: docker, or a script with the verbs build, compose and podman where no Docker engine runs.
CONTAINERS ?= docker
test-compose: setup  ## build the images and run them in containers: make test-compose CONTAINERS=docker
	CONTAINERS=$(CONTAINERS) $(BIN)/python -m pytest -m compose -s $(ARGS)

test-acceptance: setup  ## promises about answers, a short cell of each: make test-acceptance ARGS="--maskbench FOLDER"
	$(BIN)/python -m pytest -m acceptance -s -rA tests/acceptance $(ARGS)

# These two need no setup: they use the torch, triton, transformers and pytest of the GPU machine.
test-gpu:  ## tests on a CUDA device, with another Python: make test-gpu GPU_PYTHON=python3
	PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir=. --confcutdir=tests \
		tests/gpu tests/kernels/triton $(ARGS)

bench-gpu:  ## an 8B-shaped model and all kernels on a CUDA device, against its limits: make bench-gpu
	PYTHONPATH=$(GPU_PATH) $(GPU_PYTHON) -m benchmarks gpu --json benchmarks/results/gpu.json $(ARGS)

# The kernels for AVX-512 and AMX with these instructions emulated in C++, to change them on a CPU without.
EMULATED := build/emulated
$(EMULATED)/.stamp: $(SETUP_STAMP) $(wildcard tests/kernels/emulated/*.h)
	rm -rf $(EMULATED) && mkdir -p $(EMULATED) && cp -r kernels/triptych_kernels $(EMULATED)
	rm -f $(EMULATED)/triptych_kernels/cpu/*.so
	CPPFLAGS="-DTRIPTYCH_EMULATED -I$(CURDIR)/tests/kernels -ffp-contract=off -Wno-psabi -Wno-ignored-attributes" \
		$(BIN)/python setup.py --quiet build_ext --build-lib $(EMULATED) --build-temp $(EMULATED)/objects
	ls $(EMULATED)/triptych_kernels/cpu/*.so
	touch $@

test-emulated: $(EMULATED)/.stamp  ## tests of the native CPU kernels for AVX-512 and AMX on a CPU that has AVX2
	$(BIN)/python -m pytest -o pythonpath=". protos $(EMULATED)" -n 2 tests/kernels/cpu tests/system/test_determinism.py \
		-k "not has_native_ops_where_the_cpu_runs_them" $(ARGS)

simulate: setup  ## seeded random workloads on an engine core, all invariants checked: make simulate ARGS="--seeds 2000"
	$(BIN)/python -m tests.simulation $(ARGS)

bench: setup  ## a scenario of benchmarks/; --help lists them: make bench ARGS="serve --json out.json"
	$(BIN)/python -m benchmarks $(or $(ARGS),--help)

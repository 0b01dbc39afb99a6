# make serve   install what the service needs into .venv and serve on http://127.0.0.1:8000
#              (HAPROXY=1: through HAProxy, half the overhead; its statistics then listen on all interfaces)
# make test    install what the tests need as well, and run them
# make lint    ruff and mypy
# make cluster three Ray nodes on this machine, parts of which are killed, updated and scaled under load
# make soak    mixed load and random kills, SOAK_SECONDS long: nothing lost, memory flat
# make fuzz    mutated media against the intake, FUZZ_SECONDS long
PYTHON ?= python3
CONFIG ?= serve_config.yaml
HAPROXY ?= 0
FUZZ_SECONDS ?= 60
SOAK_SECONDS ?= 1800
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

export RAY_USAGE_STATS_ENABLED := 0
# What guards Serve's own proxy: bodies are capped before it buffers them, and Serve's errors get our form.
export RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH := app.middleware.at_proxy
# limits.max_body_bytes, which the proxy cannot know.
export FOVEAL_MAX_BODY_BYTES ?= 67108864
export RAY_SERVE_ENABLE_HA_PROXY := $(HAPROXY)
# An ingress that refuses work when full is not down: HAProxy is not to judge it by its answers.
export RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED := 0

.PHONY: serve test cluster soak lint fuzz footprint clean

serve: $(VENV)/.serve
	$(BIN)/python -m app $(CONFIG)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

cluster: $(VENV)/.test
	$(BIN)/python -m pytest tests/cluster -m cluster $(PYTEST_ARGS)

soak: $(VENV)/.test
	$(BIN)/python -m benchmarks.soak --seconds $(SOAK_SECONDS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fuzz: $(VENV)/.test
	$(BIN)/python -m tests.fuzz.media --seconds $(FUZZ_SECONDS)

footprint: $(VENV)/.test
	$(BIN)/python -m benchmarks.footprint

clean:
	rm -rf $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	touch $@

# torchvision is only the tests' reference. It lies beside the environment, so that what tests start runs without it.
$(VENV)/.test: $(VENV)/.serve
	$(PIP) --editable ".[test]"
	$(PIP) --no-deps --upgrade --target $(VENV)/reference torchvision
	touch $@

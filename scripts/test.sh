#!/usr/bin/env bash
# The tests, in an environment made for them. Arguments go to pytest; without any, the tests that
# take minutes (slow) or need a GPU (gpu) are left out.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_jaxft $(cuda_extra) dev
fetch_smollm2
if [ $# -eq 0 ]; then
  set -- -m "not slow and not gpu"
fi
cd "$ROOT"
exec .venv/bin/python -m pytest "$@"

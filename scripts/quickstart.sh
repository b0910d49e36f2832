#!/usr/bin/env bash
# From nothing to a tuned model: environment, model, training, a sampled answer before and after.
# Further arguments go to scripts/quickstart.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_jaxft $(cuda_extra)
fetch_smollm2
exec "$ROOT/.venv/bin/python" "$ROOT/scripts/quickstart.py" --model "$MODEL" "$@"

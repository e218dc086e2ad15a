#!/usr/bin/env bash
# llama, zero3, bf16, global batch 64 = 2 micro x 4 accumulation x 8 processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# A warning (USR1) is for the ranks: it would end their launcher. SIGTERM goes through it; it waits for the save.
trap '' USR1
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-600}
exec accelerate launch --config_file "$here/accelerate.yaml" \
  -m toolkit.train ds_configs/zero3-offload-optimizer/recipe.yaml "$@"

#!/usr/bin/env bash
# llama, zero3, bf16, global batch 64 = 2 micro x 4 accumulation x 8 processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec accelerate launch --config_file "$here/accelerate.yaml" \
  -m toolkit.train ds_configs/zero3/recipe.yaml

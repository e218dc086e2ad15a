#!/usr/bin/env bash
# llama, single, bf16, global batch 8 = 2 micro x 4 accumulation x 1 processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
exec accelerate launch --config_file "$here/accelerate.yaml" \
  -m toolkit.train ds_configs/single-lora/recipe.yaml

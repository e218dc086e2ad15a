#!/usr/bin/env bash
# llama, zero3, bf16, global batch 64 = 2 micro x 4 accumulation x 8 processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# A warning (USR1) is for the ranks: it would end their launcher. SIGTERM goes through it; it waits for the save.
trap '' USR1
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-600}
# Threads of each process: the cores that this node grants (affinity, control group), over 8.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  cores=$(nproc)
  if read -r quota period 2> /dev/null < /sys/fs/cgroup/cpu.max && [ "$quota" != max ]; then
    [ $((quota / period)) -ge "$cores" ] || cores=$((quota / period))
  fi
  export OMP_NUM_THREADS=$((cores > 8 ? cores / 8 : 1))
fi
exec accelerate launch --config_file "$here/accelerate.yaml" \
  -m toolkit.train ds_configs/zero3-offload-optimizer/recipe.yaml "$@"

#!/usr/bin/env bash
# llama, single, bf16, global batch 8 = 2 micro x 4 accumulation x 1 processes
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Paths are relative to WORKDIR; else to the folder that these files were written from, if its recipe is there;
# else to the current folder.
if [ -n "${WORKDIR:-}" ]; then
  cd "$WORKDIR"
elif [ -e "$here"/../../ds_configs/single-lora/recipe.yaml ]; then
  cd "$here"/../..
fi
# USR1 would end the launcher, so only the ranks receive it. The launcher forwards SIGTERM and waits for the save.
trap '' USR1
export PET_SHUTDOWN_TIMEOUT=${PET_SHUTDOWN_TIMEOUT:-600}
# Threads per process: the cores available on this node (affinity, cgroup), divided by 1.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  cores=$(nproc)
  if read -r quota period 2> /dev/null < /sys/fs/cgroup/cpu.max && [ "$quota" != max ]; then
    [ $((quota / period)) -ge "$cores" ] || cores=$((quota / period))
  fi
  export OMP_NUM_THREADS=$((cores > 1 ? cores / 1 : 1))
fi
exec accelerate launch --config_file "$here/accelerate.yaml" \
  -m toolkit.train ds_configs/single-lora/recipe.yaml "$@"

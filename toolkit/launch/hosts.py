"""launch-hosts.sh: starts launch.sh on every host of a list, over ssh.

Each host's ``bash -s`` reads its script and the forwarded variables from the connection, so neither appears on a
command line that `ps` shows. The connection stays open during the job and carries a heartbeat every second and the
signals. If it closes or is silent, the host ends its ranks.
"""

from __future__ import annotations

import shlex

PASSED = (
    "PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH", "HF_*", "TRANSFORMERS*", "TOKENIZERS_*",
    "TORCH*", "PYTORCH_*", "PET_*", "ACCELERATE_*", "DS_*", "TRITON_*", "NCCL_*", "GLOO_*", "UCX_*", "FI_*", "CUDA_*",
    "OMP_NUM_THREADS", "WANDB_*", "TOOLKIT_*",
)  # fmt: skip
"""Variables that are forwarded to the ranks on every host, in addition to those in PASS_ENV."""

_TEMPLATE = """\
#!/usr/bin/env bash
# shellcheck disable=SC2317  # functions that run on the hosts, and in traps
# @SUMMARY@
# Every host must have the folder that the recipe's relative paths refer to under the same path:
#   MAIN_IP=<address of the first host> launch-hosts.sh HOST ... [-- --resume]
# These variables are forwarded to the ranks, and those that PASS_ENV names ("MY_TOKEN MY_*"):
#   @PASSED@
# TERM, INT, USR1 and HUP stop the run on all hosts: it saves, and the status is 128 and the signal's number. A second
# signal ends it at once. A host whose connection ends, or is silent for SILENCE seconds (60), stops its ranks: they
# may save for STOP_GRACE seconds (120), then they are killed. REMOTE is what starts a command on a host.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
@HOME@
hosts=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do hosts+=("$1"); shift; done
[ $# -eq 0 ] || shift
[ ${#hosts[@]} -eq @NODES@ ] || { echo "give @NODES@ hosts (machine.nodes); got ${#hosts[@]}" >&2; exit 2; }
read -r -a remote <<< "${REMOTE:-ssh -T -o ServerAliveInterval=15 -o ServerAliveCountMax=4}"

# ---- what runs on a host: its standard input is the connection

on_host() {
  local mark job word heard lost="" code=0
  mark=$$.$RANDOM.$(date +%s%N)
  # The job must survive a closed output pipe, or it could not save.
  exec > >(trap '' PIPE; cat 2>/dev/null; cat > /dev/null) 2> >(trap '' PIPE; cat >&2 2>/dev/null; cat > /dev/null)
  TOOLKIT_ON_HOST=$mark "$@" < /dev/null &
  job=$!
  while [ -z "$lost" ] && kill -0 "$job" 2>/dev/null; do
    heard=0
    read -r -t "$SILENCE" word || heard=$?
    if [ "$heard" -gt 128 ]; then lost="no heartbeat from the starting host for $SILENCE s"
    elif [ "$heard" -ne 0 ]; then lost="the connection to the starting host has ended"
    else
      case $word in
        "") ;;
        # These would end the launcher: send them to the ranks only. Before there are ranks it may end.
        USR1 | HUP) signal_all "$word" "$mark" toolkit.train || kill -TERM "$job" 2>/dev/null || : ;;
        # The launcher forwards these, and waits for the save.
        TERM | INT) kill "-$word" "$job" 2>/dev/null || : ;;
        KILL) signal_all KILL "$mark" || : ;;
        END) lost="another host has failed" ;;
      esac
    fi
  done
  if [ -n "$lost" ]; then
    echo "$HOSTNAME: $lost; stopping its ranks" >&2
    kill -TERM "$job" 2>/dev/null || :
    end_within "$STOP_GRACE" "$mark"
  fi
  wait "$job" || code=$?
  # A killed launcher leaves ranks behind.
  [ "$code" -eq 0 ] || end_within "$STOP_GRACE" "$mark"
  exit "$code"
}

end_within() {  # SECONDS MARK: wait for all that was started under the mark to end, then kill it
  local until=$((SECONDS + $1))
  while [ -n "$(started_here "$2")" ]; do
    if [ "$SECONDS" -ge $((until + 30)) ]; then
      echo "$HOSTNAME: cannot be killed: $(started_here "$2")" >&2
      exit 1
    fi
    if [ "$SECONDS" -ge "$until" ]; then signal_all KILL "$2" || :; fi
    sleep 0.5
  done
}

started_here() {  # MARK [WORD]: ids of the processes that have it in their environment (and WORD as an argument)
  local file
  # shellcheck disable=SC2013  # names without spaces
  for file in $(grep -lszxF "TOOLKIT_ON_HOST=$1" /proc/[0-9]*/environ); do
    file=${file%/environ}
    # A process that has ended and is not yet collected cannot be killed.
    grep -qs '^State:.[XZ]' "$file/status" && continue
    if [ -n "${2:-}" ]; then
      grep -qszxF -- "$2" "$file/cmdline" || continue
      grep -qsz '^RANK=' "$file/environ" || continue
    fi
    echo "${file#/proc/}"
  done
}

signal_all() {  # SIGNAL MARK [WORD]; fails where there is none
  local id found=1
  for id in $(started_here "$2" "${3:-}"); do
    found=0
    kill "-$1" "$id" 2>/dev/null || :
  done
  return "$found"
}

# ---- what runs here

variables() {
  local name pattern
  for name in $(compgen -e); do
    for pattern in @PATTERNS@ ${PASS_ENV:-}; do
      # shellcheck disable=SC2254  # a pattern is meant
      case $name in $pattern) printf 'export %s=%q\\n' "$name" "${!name}"; break ;; esac
    done
  done
}

program() {  # RANK [ARGUMENT...]
  local rank=$1 main=${MAIN_IP:-${hosts[0]#*@}}
  shift
  echo 'set -euo pipefail'
  set -f
  variables
  set +f
  printf 'export NODE_RANK=%q MAIN_IP=%q WORKDIR=%q\\n' "$rank" "$main" "$PWD"
  printf 'SILENCE=%q STOP_GRACE=%q\\n' "${SILENCE:-60}" "${STOP_GRACE:-120}"
  declare -f on_host end_within started_here signal_all
  printf '%q ' on_host "$here/launch.sh" "$@"
  echo
}

connections=() jobs=() asked=0 failed=""
tell() {  # WORD: to every host that is still connected
  local connection
  for connection in ${connections[@]+"${connections[@]}"}; do
    { printf '%s\\n' "$1" >&"$connection"; } 2>/dev/null || :
  done
}
stop() {  # SIGNAL NUMBER
  if [ "$asked" -eq 0 ]; then asked=$2; tell "$1"; else tell KILL; fi
}
trap : PIPE  # a connection that has ended is seen by its ssh

box=$(mktemp -d)
trap 'rm -rf "$box"' EXIT
# A signal before all hosts are connected ends this script, and so everything that it started.
for rank in "${!hosts[@]}"; do
  mkfifo "$box/$rank"
  {
    # A connection that another host's ssh holds open would not close with this script.
    for connection in ${connections[@]+"${connections[@]}"}; do exec {connection}>&-; done
    exec "${remote[@]}" "${hosts[$rank]}" bash -s
  } < "$box/$rank" &
  jobs+=($!)
  exec {connection}> "$box/$rank"
  connections+=("$connection")
  { program "$rank" "$@" >&"$connection"; } 2>/dev/null || :
done
rm -rf "$box"
trap 'stop TERM 15' TERM
trap 'stop INT 2' INT
trap 'stop USR1 10' USR1
trap 'stop HUP 1' HUP

status=0
while [ ${#jobs[@]} -gt 0 ]; do
  for rank in "${!jobs[@]}"; do
    if kill -0 "${jobs[$rank]}" 2>/dev/null; then continue; fi
    code=0
    wait "${jobs[$rank]}" || code=$?
    connection=${connections[$rank]}
    exec {connection}>&-
    unset "jobs[$rank]" "connections[$rank]"
    if [ "$code" -ne 0 ]; then
      [ "$status" -ne 0 ] || status=$code
      if [ "$asked" -eq 0 ] && [ -z "$failed" ]; then failed=yes; tell END; fi
    fi
  done
  tell ""
  sleep 1 & wait $! || :  # a signal cuts it short
done
# A run that was stopped and has saved leaves this file; a resumed run removes it.
if [ "$asked" -ne 0 ] && [ "$status" -ne 0 ] && [ -e @STOPPED@ ]; then status=$((128 + asked)); fi
exit "$status"
"""


def hosts_script(summary: str, nodes: int, output_dir: str, home: str) -> str:
    """launch-hosts.sh for ``nodes`` hosts. ``summary``: one line about the recipe; ``output_dir``: its run.output_dir,
    where a stopped run writes stopped.json; ``home``: shell that goes to the folder that paths are relative to."""
    names, lines = list(PASSED), [""]
    for name in names:
        if len(lines[-1]) + len(name) > 112:
            lines.append("")
        lines[-1] += f" {name}" if lines[-1] else name
    values = {
        "SUMMARY": summary,
        "HOME": home,
        "PASSED": "\n#   ".join(lines),
        "PATTERNS": " ".join(names),
        "NODES": str(nodes),
        "STOPPED": shlex.quote(f"{output_dir}/stopped.json"),
    }
    text = _TEMPLATE
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text

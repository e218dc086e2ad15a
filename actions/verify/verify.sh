#!/usr/bin/env bash
# verify.sh RESULTS OVERRIDES RECIPE...
# Verifies each recipe, against RESULTS/NAME.json where there is one, and writes RESULTS/NAME.badge.json. Goes on after a
# failure. Exit status: the largest of all (1: not equivalent or weaker, 2: cannot run here).
set -u
results=$1
read -r -a overrides <<< "$2"
shift 2
if [ $# -eq 0 ]; then
  echo "::error::toolkit verify: no recipes given" >&2
  exit 2
fi
worst=0
for recipe in "$@"; do
  name=$(basename "${recipe%.*}")
  kept=$results/$name.json
  options=(--badge "$results/$name.badge.json")
  if [ -f "$kept" ]; then options+=(--baseline "$kept"); fi
  echo "::group::$recipe"
  toolkit verify "$recipe" "${overrides[@]}" "${options[@]}"
  status=$?
  echo "::endgroup::"
  if [ $status -ne 0 ]; then
    echo "::error file=$recipe::toolkit verify: exit status $status (1: not equivalent, or weaker than $kept; 2: cannot run)"
  fi
  if [ $status -gt $worst ]; then worst=$status; fi
done
exit $worst

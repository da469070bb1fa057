#!/usr/bin/env bash
# The nemesis for as long as asked: three real processes under load, one fault after the other.
#
#   cluster/soak.sh --minutes 60 [--seed 7] [--debug]
#
# The seed decides which faults come in which order; a run that fails says which it was. As root every
# kind of fault is there; otherwise those that need it are named and left out, as is the jump of the wall
# clock where libfaketime (Debian: faketime) is not installed. It writes nothing outside of the target
# directory. `--debug` runs what tests run anyway, without a release build.
set -euo pipefail
cd "$(dirname "$0")/.."

usage() {
  echo "usage: cluster/soak.sh --minutes N [--seed S] [--debug]" >&2
  exit 2
}

minutes="" seed="$(date +%s)" profile=(--release)
while (($#)); do
  case "$1" in
    --minutes) minutes="${2:-}"; shift 2 || usage ;;
    --seed) seed="${2:-}"; shift 2 || usage ;;
    --debug) profile=(); shift ;;
    *) usage ;;
  esac
done
[[ "$minutes" =~ ^[0-9]+([.][0-9]+)?$ && "$seed" =~ ^[0-9]+$ ]] || usage

export TEST_SOAK_MINUTES="$minutes" TEST_SEED="$seed"
exec cargo test --locked "${profile[@]}" --test nemesis -- \
  --exact --nocapture b1_e2_g1_k6_the_group_keeps_its_word_whatever_fails

#!/usr/bin/env bash
# Train: scripts/train.sh [CONFIG.toml] [--section.key value ...]
#
# Sets everything up on the first call. On a machine without a GPU it trains on the CPU.
#
#   CONFIG_FILE   the train config, where no argument names one
#                 (default: train_configs/llama3_debug_muon.toml)
#   NGPU          number of processes (default: 2, or 1 with a single GPU)
#   LOG_RANK      ranks that print, comma separated (default: 0)
#   TITAN_MUON_DATA, TITAN_MUON_VENV, PYTHON: data folder, virtual environment, interpreter
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

config=${CONFIG_FILE:-$ROOT/train_configs/llama3_debug_muon.toml}
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    config=$1
    shift
fi
[ -f "$config" ] || die "train config $config does not exist; see $ROOT/train_configs"

setup torchtitan

gpus=$(count_gpus)
if [ "$gpus" -eq 0 ]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
    default_processes=2
else
    export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}
    default_processes=$((gpus < 2 ? gpus : 2))
fi

exec torchrun --nproc_per_node="${NGPU:-$default_processes}" \
    --rdzv_backend c10d --rdzv_endpoint localhost:0 \
    --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3 \
    -m titan_muon.train --job.config_file "$config" "$@"

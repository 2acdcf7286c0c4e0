#!/usr/bin/env bash
#SBATCH --job-name=titan-muon
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#
# Train on several nodes: sbatch --nodes=N scripts/slurm.sh CONFIG.toml [--section.key value ...]
#
# Submit it in the checkout, which all nodes see; so must dump_folder, hf_assets_path and the data.
# DRY_RUN=1 prints what would run on the nodes and ends.
#
#   NGPU           processes (GPUs) of a node (default: Slurm's number of GPUs, else 8)
#   MASTER_PORT    port of the rendezvous on the first node (default: 29500)
#   MAX_REQUEUES   how often a job that failed goes back into the queue (default: 3); every start
#                  resumes from the last checkpoint
#   LOG_RANK       ranks of each node that print, comma separated (default: 0)
#   TITAN_MUON_DATA, TITAN_MUON_VENV, PYTHON: data folder, virtual environment, interpreter
#   NCCL_SOCKET_IFNAME, NCCL_IB_HCA, ...: NCCL's own, passed on as they are
set -euo pipefail
# Slurm runs a copy of this file; the checkout is where the job was submitted.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"
[ -f scripts/setup.sh ] || {
    echo "error: $PWD is no checkout of titan-muon; call sbatch in one, or with --chdir=CHECKOUT" >&2
    exit 1
}
source scripts/setup.sh

[ $# -gt 0 ] || die "name a train config: sbatch --nodes=N scripts/slurm.sh CONFIG.toml; see $ROOT/train_configs"
config=$1
shift
[ -f "$config" ] || die "train config $config does not exist; see $ROOT/train_configs"
[ -n "${SLURM_JOB_ID:-}" ] || die "this is no Slurm job; submit it with sbatch, or use scripts/train.sh on one node"

nodes=${SLURM_JOB_NUM_NODES:?Slurm has not set it}
gpus=${NGPU:-${SLURM_GPUS_ON_NODE:-8}}
hosts=$(scontrol show hostnames "${SLURM_JOB_NODELIST:?Slurm has not set it}")
head=${hosts%%$'\n'*}

command=(srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --kill-on-bad-exit=1
    torchrun --nnodes="$nodes" --nproc_per_node="$gpus"
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$head:${MASTER_PORT:-29500}"
    --local-ranks-filter "${LOG_RANK:-0}" --role rank --tee 3
    -m titan_muon.train --job.config_file "$config" "$@")
if [ -n "${DRY_RUN:-}" ]; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi

setup torchtitan
data=${TITAN_MUON_DATA:-outputs/data}
# Once, before many nodes would.
[ -f "$data/manifest.json" ] || python -m titan_muon.integration.data --output "$data"
export PYTORCH_ALLOC_CONF=${PYTORCH_ALLOC_CONF:-expandable_segments:True}

status=0
"${command[@]}" || status=$?
if [ $status -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-3}" ]; then
    echo "ended with code $status; back into the queue, to resume from the last checkpoint"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status

#!/bin/bash
#SBATCH --job-name=esm-turbo
#SBATCH --array=1-4
#SBATCH --cpus-per-task=1
#SBATCH --time=01:00:00
# One task of the array does one shard: `sbatch score.sh TARGETS CANDIDATES OUT`. For GPUs, add `#SBATCH --gres=gpu:1`.
# Afterwards: `esm-turbo status OUT` and `esm-turbo merge OUT`.
set -euo pipefail
esm-turbo score "$1" "$2" --out "$3" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT" --threads "${SLURM_CPUS_PER_TASK:-1}"

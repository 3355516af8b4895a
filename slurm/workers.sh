#!/bin/bash
# More sandbox nodes for a run that is going on: `hpcrl workers add RUN --nodes 4 --partition cpu` submits this script with its options
# (so may `sbatch --nodes=4 slurm/workers.sh --run-dir RUN`). Such a job may be preempted or cancelled at any time: what its workers held
# is tried again elsewhere. It ends with the run.
#
# What to change for your cluster: partition, a QOS that may be preempted, account, time; load modules at the mark below.

#SBATCH --job-name=hpcrl-workers
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --partition=cpu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4

set -euo pipefail
cd "${HPCRL_ROOT:-$SLURM_SUBMIT_DIR}"

# Modules of your site go here, for example:
#   module load apptainer

exec .venv/bin/python -m hpcrl.launch.workers "$@"

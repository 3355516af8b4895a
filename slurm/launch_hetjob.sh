#!/bin/bash
# One hpcrl run as one Slurm heterogeneous job.
#
#   sbatch slurm/launch_hetjob.sh configs/quickstart.yaml [--set KEY=VALUE]... [--run-dir DIR]
#   sbatch slurm/launch_hetjob.sh --resume runs/RUN_ID
#
# Sizes follow the allocation: change the lines below, or override them per component on the command line:
#
#   sbatch --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 : --nodes=4 : --nodes=16 slurm/launch_hetjob.sh CONFIG
#
# What to change for your cluster: the three partitions, GPUs per node, time; add account and QOS where your site asks for them
# (#SBATCH --account=NAME in each component); load modules at the mark below. The project must lie on a shared file system.
#
# --signal: so many seconds before the time limit the trainer writes a checkpoint, and the job goes back into the queue and on from there.

# --- component 0: trainer. One task per GPU (torch.distributed ranks).
#SBATCH --job-name=hpcrl
#SBATCH --output=slurm-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --time=24:00:00
#SBATCH --partition=train
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --gpus-per-node=2

#SBATCH hetjob
# --- component 1: inference. One task per vLLM replica.
#SBATCH --partition=infer
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=1

#SBATCH hetjob
# --- component 2: sandboxes. CPU nodes; each runs workers (agents) and scorers (private checks).
#SBATCH --partition=cpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4

set -euo pipefail
trap '' USR1  # until the launcher listens
cd "${HPCRL_ROOT:-$SLURM_SUBMIT_DIR}"

# Modules of your site go here, for example:
#   module load apptainer cuda mpich

exec .venv/bin/python -m hpcrl.launch.batch "$@"

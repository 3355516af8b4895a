#!/bin/bash
#SBATCH --job-name=hpcrl-doctor
#SBATCH --output=/work/wt/admin5/.hpcrl-doctor-5ltg26oi/job.out
#SBATCH --no-requeue
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --time=6
#SBATCH --partition=train
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=6
#SBATCH --partition=infer
#SBATCH hetjob
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=6
#SBATCH --partition=cpu
cd /work/wt/admin5
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
MPIR_CVAR_NOLOCAL=1 SLURM_PMI2_TREE_WIDTH=65533 timeout 60 srun --het-group=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --mpi=pmi2 --kill-on-bad-exit=1 --output=/work/wt/admin5/.hpcrl-doctor-5ltg26oi/mpi-0-%t.log /work/wt/admin5/.venv/bin/python -m mpi4py -m hpcrl.bench.pairs /work/wt/admin5/.hpcrl-doctor-5ltg26oi/pairs.json : --het-group=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 --overlap --mpi=pmi2 --kill-on-bad-exit=1 --output=/work/wt/admin5/.hpcrl-doctor-5ltg26oi/mpi-1-%t.log /work/wt/admin5/.venv/bin/python -m mpi4py -m hpcrl.bench.pairs /work/wt/admin5/.hpcrl-doctor-5ltg26oi/pairs.json
srun --mpi=none --het-group=0 --nodes=1 --ntasks=1 --ntasks-per-node=1 --overlap --output=/work/wt/admin5/.hpcrl-doctor-5ltg26oi/probe-0-%t.log /work/wt/admin5/.venv/bin/python -m hpcrl.cli.doctor_node /work/wt/admin5/.hpcrl-doctor-5ltg26oi mpi 5 /work/wt/admin5/configs/quickstart.yaml : --mpi=none --het-group=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 --overlap --output=/work/wt/admin5/.hpcrl-doctor-5ltg26oi/probe-1-%t.log /work/wt/admin5/.venv/bin/python -m hpcrl.cli.doctor_node /work/wt/admin5/.hpcrl-doctor-5ltg26oi inference 5 /work/wt/admin5/configs/quickstart.yaml : --mpi=none --het-group=2 --nodes=2 --ntasks=2 --ntasks-per-node=1 --overlap --output=/work/wt/admin5/.hpcrl-doctor-5ltg26oi/probe-2-%t.log /work/wt/admin5/.venv/bin/python -m hpcrl.cli.doctor_node /work/wt/admin5/.hpcrl-doctor-5ltg26oi sandbox 5 /work/wt/admin5/configs/quickstart.yaml

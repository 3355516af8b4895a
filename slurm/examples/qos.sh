#!/bin/bash
# Where accounting (slurmdbd) runs: a QOS for training runs, and one that gives way to it for workers that come and go.
# A heterogeneous job counts as one job for each component: MaxSubmitJobsPerUser must leave room for three.
set -euo pipefail
sacctmgr -i add qos training Priority=100 MaxSubmitJobsPerUser=12
sacctmgr -i add qos spare Priority=1 Flags=DenyOnLimit GraceTime=10
sacctmgr -i modify qos training set Preempt=spare PreemptMode=off
sacctmgr -i modify qos spare set PreemptMode=requeue
# slurm.conf: PreemptType=preempt/qos (in place of partition_prio); AccountingStorageEnforce=limits,qos. Then: hpcrl workers add RUN --sbatch --qos=spare

"""From a configuration to running roles: under Slurm (one heterogeneous job) or on this machine alone."""

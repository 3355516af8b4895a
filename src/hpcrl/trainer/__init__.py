"""The trainer: batches of trajectories in, versions of the weights out."""

"""Isolated places to run an agent's commands: Apptainer containers, one per attempt, with a command server on a pipe."""

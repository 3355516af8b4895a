"""hpcrl: agentic RL training of language models in one Slurm heterogeneous job."""

__version__ = "0.1.0"

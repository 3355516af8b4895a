"""Stands in for the package of this name; see ``hpcrl.bench.stand_in``."""

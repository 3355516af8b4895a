"""Trajectories: the token-exact record of an attempt, and the HDF5 shards that hold them."""

from hpcrl.trajectory.build import from_record
from hpcrl.trajectory.reader import ShardCache, ShardReader
from hpcrl.trajectory.schema import SCHEMA_NAME, SCHEMA_VERSION, Trajectory
from hpcrl.trajectory.writer import ShardWriter

__all__ = ["SCHEMA_NAME", "SCHEMA_VERSION", "ShardCache", "ShardReader", "ShardWriter", "Trajectory", "from_record"]

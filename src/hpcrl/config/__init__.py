"""The run configuration."""

from hpcrl.config.load import dump_config, load_config, parse_config
from hpcrl.config.schema import RunConfig

__all__ = ["RunConfig", "dump_config", "load_config", "parse_config"]

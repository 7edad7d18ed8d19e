"""How each model class is cut into stages."""

from headway.parallel.pipeline.families.find import Pipelined, find_pipelined

__all__ = ["Pipelined", "find_pipelined"]

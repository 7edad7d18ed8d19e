"""Weights out of a run: folders that diffusers and transformers load alone."""

from headway.export.write import export_weights

__all__ = ["export_weights"]

"""Weights out of a run: folders that diffusers and transformers load alone."""

from headway.export.write import check_destination, export_weights

__all__ = ["check_destination", "export_weights"]

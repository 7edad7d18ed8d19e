"""Headway plans, runs and explains the training of generative models."""

__version__ = "0.1.0"

"""The hardware that a run stands on: a catalogue of accelerators."""

from headway.cluster.catalogue import Accelerator, accelerator_named, accelerator_of_device, load_catalogue

__all__ = ["Accelerator", "accelerator_named", "accelerator_of_device", "load_catalogue"]

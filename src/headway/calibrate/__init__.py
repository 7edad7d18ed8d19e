"""Calibration: what this machine reaches, measured and written as a cluster that predictions can stand on."""

from headway.calibrate.effort import FULL, QUICK, SHORT, Effort
from headway.calibrate.from_run import FromRun, calibrate_from
from headway.calibrate.machine import Calibration, calibrate
from headway.calibrate.measurement import device_type

__all__ = ["FULL", "QUICK", "SHORT", "Calibration", "Effort", "FromRun", "calibrate", "calibrate_from", "device_type"]

"""Calibration: what this machine reaches, measured and written as a cluster that predictions can stand on."""

from headway.calibrate.effort import FULL, QUICK, Effort
from headway.calibrate.from_run import FromRun, calibrate_from
from headway.calibrate.machine import Calibration, calibrate

__all__ = ["FULL", "QUICK", "Calibration", "Effort", "FromRun", "calibrate", "calibrate_from"]

"""Numerical parity: every layout of a recipe computes what one device does, or is told to be wrong."""

from headway.check.checking import CheckResult, check_recipe
from headway.check.layouts import Layout, auto_layouts, make_layout, parse_layouts
from headway.check.shrink import shrunk
from headway.check.verdict import ERRORS, FirstDifference, LayoutResult

__all__ = [
    "ERRORS",
    "CheckResult",
    "FirstDifference",
    "Layout",
    "LayoutResult",
    "auto_layouts",
    "check_recipe",
    "make_layout",
    "parse_layouts",
    "shrunk",
]

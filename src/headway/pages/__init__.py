"""Pages that need no network: what all of them share, and how one is filled."""

from headway.pages.page import filled

__all__ = ["filled"]

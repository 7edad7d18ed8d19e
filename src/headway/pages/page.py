"""One file with everything that a browser needs: a template, its data, and the style and scripts of all pages."""

import json
from importlib.resources import files
from typing import Any

SHARED = ("style.css", "elements.js", "lanes.js")
"""Put in a template where it names them in a comment: ``/* style.css */``."""


def filled(room: str, template: str, data: Any) -> str:
    """The page that ``template``, a file of the package ``room``, makes of ``data`` (plain values for JSON)."""
    page = files(room).joinpath(template).read_text(encoding="utf-8")
    for name in SHARED:
        page = page.replace(f"/* {name} */", files("headway.pages").joinpath(name).read_text(encoding="utf-8"))
    # Data comes last, so that no text in it is taken for a place to be filled.
    return page.replace('"DATA"', json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))

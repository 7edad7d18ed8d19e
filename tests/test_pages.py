"""A page is one file: its style, scripts and data are put in, and nothing in the data is taken for a place to fill."""

import json
import re
from importlib.resources import files

import pytest

from headway.pages import filled
from headway.pages.page import SHARED

TEMPLATES = [("headway.explain", "page.html"), ("headway.rehearse", "page.html"), ("headway.plan", "plan.html")]


@pytest.mark.parametrize(("room", "template"), TEMPLATES)
def test_every_place_of_a_template_is_filled_once_and_data_is_text(room, template):
    data = {"name": '/* style.css */ "DATA" </script>'}
    page = filled(room, template, data)
    asked = [name for name in SHARED if f"/* {name} */" in files(room).joinpath(template).read_text()]
    for name in asked:
        assert page.count(files("headway.pages").joinpath(name).read_text()) == 1
    assert not re.search(r"(src|href)=|@import|https?://(?!www\.w3\.org)", page)
    (line,) = re.findall(r"^const data = (.*);$", page, re.M)
    assert json.loads(line.replace("\\u003c", "<")) == data

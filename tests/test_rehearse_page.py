"""The page of a prediction needs no network, shows every span and the whole memory, and can be read by a browser."""

import json
import re

import numpy as np
import pytest

from headway.rehearse import page
from headway.rehearse.memory import GIB
from headway.rehearse.page import page_data, write_page
from headway.rehearse.prediction import Prediction, predict
from rehearsed_steps import Step, exact_cluster


def busy_step(blocks: int) -> Prediction:
    step = Step()
    kept = []
    for block in range(blocks):
        for _ in range(5):
            step.run(10, module=f"blocks.{block}", name="aten.<script>.default")
        kept.append(step.allocate(2**28, "activation", module=f"blocks.{block}"))
    for block in reversed(range(blocks)):
        for _ in range(5):
            step.run(20, module=f"blocks.{block}", phase="backward")
        step.free(kept.pop())
    return predict([step.record()], exact_cluster(launch_us=0.001))


def covered(lane) -> int:
    return sum(end - start for start, end in zip(lane["start"], lane["end"], strict=True))


@pytest.mark.parametrize("most", [20_000, 60])
def test_spans_that_are_drawn_as_one_cover_the_same_time(monkeypatch, most):
    monkeypatch.setattr(page, "SPANS", most)
    prediction = busy_step(20)
    lanes = {lane["name"]: lane for lane in page_data(prediction, "toy")["ranks"][0]["lanes"]}
    assert list(lanes) == ["compute", "host"]
    compute = lanes["compute"]
    assert covered(compute) == 20 * 5 * 30
    assert sum(compute["count"]) == 200
    assert (len(compute["start"]) == 200) == (most > 1000)
    assert len(compute["start"]) + len(lanes["host"]["start"]) <= max(most, 400)
    assert {page.COLOURS[code] for code in compute["colour"]} == {"forward", "backward"}


def test_the_curve_keeps_its_peak_and_adds_up_to_what_is_held():
    prediction = busy_step(40)
    curve = page_data(prediction, "toy")["ranks"][0]["memory"]
    totals = np.array(curve["held"]).sum(axis=0)
    assert totals.max() == pytest.approx(curve["peak"]) == pytest.approx(40 * 2**28 / GIB)
    assert curve["at"] == sorted(curve["at"])
    assert curve["peak_at"] in curve["at"]
    assert curve["names"] == ["activation"]


def test_the_page_needs_nothing_else_and_keeps_names_as_text(tmp_path):
    write_page(busy_step(2), "a </script> title", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert not re.search(r"(src|href)=|https?://|@import|url\(", text)
    assert text.count("</script>") == 1
    (data,) = re.findall(r"^const data = (.*);$", text, flags=re.M)
    read = json.loads(data)
    assert read["title"] == "a </script> title"
    assert read["prediction"]["step_time_s"]["value"] > 0
    assert any("<script>" in told for lane in read["ranks"][0]["lanes"] for told in lane["texts"])

"""What a person sees of a run, on a terminal and anywhere else, and the sample grids."""

import io
import math
import re

import pytest
import torch
from PIL import Image
from rich.console import Console

from headway.runs.console import RunConsole
from headway.runs.summary import RunSummary
from headway.train.picture_grid import GAP, save_grid


def line(step: int = 4, **values: float | None) -> dict:
    known = {
        "step": step,
        "loss": 0.98765,
        "grad_norm": 1.2345,
        "lr": 1e-3,
        "step_time_s": 0.2,
        "data_wait_s": 0.006,
        "samples": 320,
        "tokens": None,
        "tokens_per_s": None,
        "samples_per_s": 310.4,
        "tflops_per_device": 0.0456,
        "mfu": None,
        "hfu": None,
        "peak_memory_gib": 0.71,
    }
    return known | values


def plain(rank: int = 0) -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, quiet=rank != 0)
    return RunConsole(10, rank=rank, sample_name="images", console=console), out


def terminal() -> tuple[RunConsole, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None, _environ={"TERM": "xterm"})
    return RunConsole(10, sample_name="images", console=console), out


@pytest.fixture(autouse=True)
def person_at_a_terminal(monkeypatch):
    for name in ("CI", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def test_a_log_gets_one_plain_line_a_step():
    console, out = plain()
    console.start(0)
    console.training(line())
    console.close()
    assert "\x1b" not in out.getvalue()
    (text,) = out.getvalue().splitlines()
    assert text.startswith(
        "step 5/10  loss 0.9877  grad norm 1.23  lr 1.00e-03  310 images/s  0.0456 TFLOP/s  0.71 GiB  data wait 3%"
    )


def test_with_a_known_peak_the_mfu_is_shown_in_place_of_the_rate_of_operations():
    console, out = plain()
    console.training(line(mfu=0.412, tflops_per_device=407.0, tokens_per_s=12345.6))
    assert "12,346 tokens/s" in out.getvalue()
    assert "MFU 41.2%" in out.getvalue()
    assert "TFLOP/s" not in out.getvalue()


def test_what_is_not_known_is_left_out_and_what_is_not_finite_is_said():
    console, out = plain()
    console.training({"step": 0, "loss": math.nan, "grad_norm": None})
    assert out.getvalue().strip().startswith("step 1/10  loss nan  grad norm -")
    assert "None" not in out.getvalue()


def test_a_terminal_gets_a_bar_with_messages_above_it():
    console, out = terminal()
    console.start(2)
    console.training(line())
    console.message("look [here]", "warning")
    console.close()
    console.close()
    text = out.getvalue()
    assert "5/10" in text
    assert "310 images/s" in text
    assert "warning: look [here]" in text
    assert text.rindex("\x1b[?25h") > text.rindex("5/10"), "the cursor is given back"


@pytest.mark.parametrize("variable", ["CI", "NO_COLOR"])
def test_ci_and_people_who_want_no_colours_get_plain_lines(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    console, out = terminal()
    console.start(0)
    console.training(line())
    console.close()
    assert out.getvalue().startswith("step 5/10")


def test_other_ranks_print_nothing(capsys):
    console = RunConsole(10, rank=1)
    console.start(0)
    console.title({"model": "x"})
    console.training(line())
    console.message("hello")
    console.close()
    assert capsys.readouterr().out == ""


def test_events_are_told_in_words_and_quiet_ones_are_not():
    console, out = plain()
    console.event("checkpoint_started", {"step": 3, "stall_s": 0.1})
    assert out.getvalue() == ""
    console.event("checkpoint_saved", {"message": "saved runs/x/checkpoints/step-3 (12 bytes)"})
    reason = "the loss is not finite"
    skipped = {"step": 7, "reason": reason, "loss": math.nan, "grad_norm": math.inf, "positions_of_step": [56, 64]}
    console.event("step_skipped", skipped)
    console.event("bad_records", {"step": 8, "records": ["a/b.png: truncated", "c.png: not a picture"]})
    assert out.getvalue().splitlines() == [
        "saved runs/x/checkpoints/step-3 (12 bytes)",
        "warning: step 7 skipped, the loss is not finite: loss nan, gradient norm inf; images 56 to 63 of the data's "
        "order (events.jsonl has more)",
        "warning: corrupt record in step 8, not counted: a/b.png: truncated and 1 more (events.jsonl names them)",
    ]


def test_the_summary_says_what_the_run_came_to_and_keeps_paths_whole(tmp_path):
    summary = RunSummary(
        steps=830,
        samples=53120,
        loss_first=2.0,
        loss_last=0.25,
        validation_first=1.9,
        validation_last=0.5,
        samples_per_s=310.0,
        tokens_per_s=None,
        tflops_per_device=0.05,
        mfu=None,
        hfu=None,
        data_wait_share=0.034,
        peak_memory_gib=0.7,
        skipped_steps=0,
        bad_records=0,
    )
    console, out = plain()
    path = tmp_path / ("long" * 20) / "step-830.png"
    console.summary(summary, {"samples": str(path)})
    text = out.getvalue()
    assert str(path) in text
    rows = dict(re.findall(r"│ (\S.*?\S?)\s+│ (.*?)\s+│", text))
    assert rows["training loss"] == "2.0000 -> 0.2500"
    assert rows["validation loss"] == "1.9000 -> 0.5000"
    assert rows["images/s"] == "310.0 (median)"
    assert rows["waiting for data"] == "3.4% of the time"
    assert "MFU" not in rows
    assert "skipped steps" not in rows


def test_small_pictures_are_enlarged_by_whole_pixels_in_rows_under_headings(tmp_path):
    colours = torch.tensor([[255, 0, 0], [0, 255, 0], [0, 0, 255]], dtype=torch.uint8)
    pictures = colours[:, :, None, None].expand(3, 3, 32, 32).clone()
    pictures[:, :, 0, 0] = 0
    path = tmp_path / "deep" / "grid.png"
    save_grid(pictures, ["red", "green", "blue " * 40], path, headings={0: "trained", 2: "never trained on"})
    with Image.open(path) as grid:
        pixels = torch.frombuffer(bytearray(grid.convert("RGB").tobytes()), dtype=torch.uint8)
        pixels = pixels.view(grid.height, grid.width, 3)
    for index, colour in enumerate(colours):
        rows, columns = (pixels == colour).all(-1).nonzero(as_tuple=True)
        assert len(rows) == 128 * 128 - 4 * 4, "four times the side, the dark corner too"
        assert columns.min() == GAP + (index % 2) * (128 + GAP)
    green_rows = (pixels == colours[1]).all(-1).nonzero()[:, 0]
    blue_rows = (pixels == colours[2]).all(-1).nonzero()[:, 0]
    assert blue_rows.min() > green_rows.max(), "a heading begins a new row"


def test_videos_are_film_strips_and_move_beside_them(tmp_path):
    videos = torch.zeros(2, 3, 5, 128, 64, dtype=torch.uint8)
    videos[:, 0] = torch.arange(0, 250, 50).view(5, 1, 1)
    save_grid(videos, ["a", "b"], tmp_path / "grid.png")
    with Image.open(tmp_path / "grid.png") as strip:
        assert strip.width == 2 * GAP + 5 * 65 - 1
        reds = [strip.getpixel((GAP + 32 + 65 * frame, GAP + 64))[0] for frame in range(5)]
    assert reds == [0, 50, 100, 150, 200]
    with Image.open(tmp_path / "grid.webp") as moving:
        assert moving.n_frames == 5


def test_wrong_shapes_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"uint8 \(N, 3"):
        save_grid(torch.zeros(1, 3, 8, 8), ["a"], tmp_path / "x.png")
    with pytest.raises(ValueError, match="2 pictures and 1 captions"):
        save_grid(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["a"], tmp_path / "x.png")

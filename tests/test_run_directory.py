"""The run directory: what a killed or resumed run may leave and find."""

import json
import os
import resource
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import RunFailed, UserError
from headway.recipe import Recipe, load_recipe, parse_recipe
from headway.runs.json_lines import append_line, encode_line, read_lines
from headway.runs.run_directory import RunDirectory, differences, read_events, read_metrics
from ranks import fork, run_ranks


def recipe(path: Path, **sections: dict) -> Recipe:
    document = {
        "model": {"class_name": "SD3Transformer2DModel", "config": {"num_layers": 2}},
        "objective": {"kind": "flow_matching"},
        "data": {"kind": "openmoji"},
        "run": {"steps": 10, "global_batch": 8, "micro_batch": 4, "directory": str(path)},
    }
    for name, values in sections.items():
        document[name] = document.get(name, {}) | values
    return parse_recipe(document, source="test")


def log_steps(directory: RunDirectory, steps: range) -> None:
    for step in steps:
        append_line(directory.metrics_file, {"step": step, "loss": 1.0 / (step + 1)})


def test_a_new_run_leaves_its_resolved_recipe_which_reads_back_equal(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "run")
    wanted = recipe(directory.path)
    assert directory.open(wanted) == []
    assert load_recipe(directory.recipe_file) == wanted
    assert directory.checkpoints.is_dir()
    assert directory.samples.is_dir()


def test_resuming_cuts_off_the_lines_of_steps_that_run_again(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(recipe(tmp_path))
    append_line(directory.metrics_file, {"step": 0, "validation_loss": 3.0})
    log_steps(directory, range(7))
    append_line(directory.metrics_file, {"step": 4, "validation_loss": 2.0})
    append_line(directory.metrics_file, {"step": 6, "validation_loss": 1.0})
    directory.open(recipe(tmp_path), next_step=4)
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == [0, 1, 2, 3]
    assert [line["step"] for line in lines if "validation_loss" in line] == [0, 4], "of the very weights that go on"


def test_starting_over_leaves_no_line_of_the_run_before(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(recipe(tmp_path))
    append_line(directory.metrics_file, {"step": 0, "validation_loss": 3.0})
    log_steps(directory, range(3))
    directory.open(recipe(tmp_path))
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_a_torn_last_line_is_dropped_and_the_next_one_stands_alone(tmp_path, cut):
    directory = RunDirectory(tmp_path)
    directory.open(recipe(tmp_path))
    log_steps(directory, range(3))
    directory.event("started", step=0)
    for file in (directory.metrics_file, directory.events_file):
        file.write_bytes(file.read_bytes()[:-cut])
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1]
    assert read_events(tmp_path) == []
    directory.create()
    directory.event("again")
    log_steps(directory, range(2, 3))
    assert [event["kind"] for event in read_events(tmp_path)] == ["again"]
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]


def test_damage_before_the_last_line_is_named_not_hidden(tmp_path):
    file = tmp_path / "metrics.jsonl"
    for damaged in ('{"st', "[]", "\0\0"):
        file.write_text(f'{{"step": 0}}\n{damaged}\n{{"step": 2}}\n')
        with pytest.raises(UserError, match=r"metrics\.jsonl:2: not a line of JSON .*: mend or delete the line"):
            read_metrics(file)


def test_a_tail_of_zeros_that_a_power_cut_leaves_is_dropped(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(recipe(tmp_path))
    log_steps(directory, range(2))
    with directory.metrics_file.open("ab") as file:
        file.write(bytes(4096))
    directory.create()
    log_steps(directory, range(2, 3))
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2]


@pytest.mark.parametrize("text", ["one\u2028line", "one\x85line", "a\x0bb", os.fsdecode(b"\xff.png")])
def test_texts_that_look_like_line_breaks_and_names_that_are_no_text_are_read_back(tmp_path, text):
    append_line(tmp_path / "events.jsonl", {"records": [text]})
    append_line(tmp_path / "events.jsonl", {"records": []})
    assert [event["records"] for event in read_events(tmp_path)] == [[text], []]


def _append_up_to(path: str, bytes_allowed: int) -> int:
    """Lines that were taken by a file which may not grow beyond a size; the line refused must leave no trace."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_allowed, bytes_allowed))
    file = Path(path)
    while bytes_allowed - (file.stat().st_size if file.exists() else 0) > 200:
        append_line(file, {"step": len(read_lines(file)), "text": "x" * 100})
    with pytest.raises(RunFailed, match=r"can't be written: File too large .* it goes on from the newest checkpoint"):
        append_line(file, {"step": -1, "text": "x" * 200})
    return len(read_lines(file))


@pytest.mark.parametrize("bytes_allowed", [10_000, 10_001, 10_050])
def test_a_line_that_does_not_fit_is_taken_back_whole(tmp_path, bytes_allowed):
    file = tmp_path / "metrics.jsonl"
    (taken,) = run_ranks(1, _append_up_to, str(file), bytes_allowed)
    assert file.read_bytes().endswith(b"}\n")
    assert [line["step"] for line in read_lines(file)] == list(range(taken))


def _append_for_ever(path: str) -> None:
    step = 0
    while True:
        append_line(Path(path), {"step": step, "text": "x" * 500})
        step += 1


def test_a_writer_killed_at_any_moment_loses_at_most_its_last_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    writer = fork.Process(target=_append_for_ever, args=(str(file),), daemon=True)
    writer.start()
    while not file.exists() or file.stat().st_size < 200_000:
        assert writer.is_alive()
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    lines = read_lines(file)
    assert [line["step"] for line in lines] == list(range(len(lines)))
    assert len(lines) > 300


def started(path: Path) -> RunDirectory:
    """A run of ``recipe`` with a checkpoint."""
    directory = RunDirectory(path)
    directory.open(recipe(path))
    (directory.checkpoints / "step-00000005").mkdir()
    return directory


def test_what_decides_the_computation_cannot_change_on_resume(tmp_path):
    other = recipe(tmp_path, run={"seed": 7, "steps": 20}, model={"config": {"num_layers": 3}})
    with pytest.raises(UserError) as caught:
        started(tmp_path).check(other)
    message = str(caught.value)
    assert "run.seed: 0 -> 7" in message
    assert "model.config.num_layers: 2 -> 3" in message
    assert "run.steps" not in message


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("run", {"global_batch": 16}),
        ("data", {"resolution": 64}),
        ("data", {"shuffle": False}),
        ("data", {"hold_out": ["red heart"]}),
        ("objective", {"timesteps": "uniform"}),
        ("optim", {"kind": "muon"}),
        ("ema", {"decays": [0.99]}),
        ("precision", {"master": "bfloat16"}),
        ("model", {"lora": {"rank": 4}}),
    ],
)
def test_each_key_of_the_computation_is_held(tmp_path, section, values):
    with pytest.raises(UserError, match=f"{section}.{next(iter(values))}"):
        started(tmp_path).check(recipe(tmp_path, **{section: values}))


def test_length_speed_and_places_may_change_and_are_recorded(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(recipe(tmp_path))
    longer = recipe(
        tmp_path,
        run={"steps": 20, "micro_batch": 2, "compile": True},
        layout={"dp_replicate": 2},
        data={"workers": 3, "path": "/elsewhere"},
        optim={"lr": 5e-5},
        sample={"prompts": ["red heart"]},
    )
    changes = directory.open(longer, next_step=5)
    assert {change.key for change in changes} == {
        "run.steps",
        "run.micro_batch",
        "run.compile",
        "layout.dp_replicate",
        "data.workers",
        "data.path",
        "optim.lr",
        "sample.prompts",
    }
    event = read_events(tmp_path)[-1]
    assert event["kind"] == "recipe_changed"
    assert {"key": "run.steps", "old": 10, "new": 20} in event["changes"]
    assert "run.steps: 10 -> 20" in event["message"]
    assert "data.path: unset -> '/elsewhere'" in event["message"]
    assert load_recipe(directory.recipe_file) == longer


def test_a_run_without_a_checkpoint_may_start_over_with_any_recipe(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.open(recipe(tmp_path))
    directory.check(recipe(tmp_path, run={"seed": 3}))
    assert [change.key for change in directory.open(recipe(tmp_path, run={"seed": 3}))] == ["run.seed"]


def test_starting_over_on_top_of_checkpoints_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds checkpoints .* checkpoint\.resume = true"):
        started(tmp_path).check(recipe(tmp_path, checkpoint={"resume": False}))


def test_a_run_has_finished_when_nothing_was_started_since(tmp_path):
    directory = RunDirectory(tmp_path)
    assert directory.finished_at() is None
    for kind, step, expected in (("started", 0, None), ("finished", 10, 10), ("sampled", 10, 10), ("resumed", 8, None)):
        directory.event(kind, step=step)
        assert directory.finished_at() == expected


def test_a_run_resumed_after_its_last_step_validates_anew(tmp_path):
    directory = started(tmp_path)
    log_steps(directory, range(10))
    append_line(directory.metrics_file, {"step": 10, "validation_loss": 1.0})
    directory.open(recipe(tmp_path, run={"steps": 20}), next_step=10)
    assert "validation_loss" in read_metrics(tmp_path)[-1]
    directory.open(recipe(tmp_path), next_step=10)
    assert read_metrics(tmp_path)[-1]["step"] == 9


def test_other_ranks_write_nothing(tmp_path):
    directory = RunDirectory(tmp_path / "run", rank=1)
    directory.create()
    assert directory.open(recipe(tmp_path)) == []
    directory.event("started")
    assert not directory.path.exists()


def test_an_event_says_when_and_what(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.event("step_skipped", step=3, loss=float("nan"), positions=[1, 2])
    (event,) = read_events(tmp_path)
    assert event["time"].endswith("+00:00")
    assert event["kind"] == "step_skipped"
    assert event["loss"] is None
    assert event["non_finite"] == {"loss": "nan"}


def test_a_directory_that_cannot_be_made_is_the_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run\.directory = .*file/run: cannot be created"):
        RunDirectory(tmp_path / "file" / "run").create()


def _created_by_nobody(path: str) -> str:
    root = os.getuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    with pytest.raises(UserError) as refused:
        RunDirectory(Path(path)).create()
    if root:
        os.setresuid(0, 0, 0)
    return str(refused.value)


@pytest.mark.parametrize("forbidden", [".", "checkpoints", "metrics.jsonl"])
def test_a_directory_that_this_user_may_not_write_is_the_users_error(forbidden):
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        RunDirectory(run).open(recipe(run))
        append_line(run / "metrics.jsonl", {"step": 0})
        for path in (run, *run.iterdir()):
            path.chmod(0o777)
        (run / forbidden).chmod(0o555)
        message = run_ranks(1, _created_by_nobody, folder)[0]
        assert message == f"run.directory = {run}: this user may not read and write {run / forbidden}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda items: st.lists(items, max_size=3) | st.dictionaries(st.text(), items, max_size=3),
    max_leaves=8,
)


@given(fields=st.dictionaries(st.text(), JSON, max_size=4))
def test_any_fields_make_one_line_of_strict_json(fields):
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = encode_line(fields)
    assert line.count("\n") == 1
    decoded = json.loads(line, parse_constant=refuse)
    assert set(fields) <= set(decoded)


def test_equal_recipes_do_not_differ(tmp_path):
    assert differences(recipe(tmp_path), recipe(tmp_path)) == []

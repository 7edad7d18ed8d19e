"""Metrics lines, writers, rates and memory."""

import json
import math
import socket
import threading
import time
from importlib import import_module
from importlib.util import find_spec

import pytest
import torch
from PIL import Image

from headway.errors import UserError
from headway.runs.run_directory import RunDirectory, read_events, read_metrics
from headway.runs.summary import summarise
from headway.train import metrics, writer_thread
from headway.train.metrics import METRICS, MetricsWriters, require_installed
from headway.train.throughput import StepTimer, peak_memory_gib
from ranks import run_ranks
from test_run_directory import recipe


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


def opened(tmp_path, writers: list[str], next_step: int = 0) -> MetricsWriters:
    wanted = recipe(tmp_path, metrics={"writers": writers})
    directory = RunDirectory(tmp_path)
    directory.open(wanted, next_step)
    return MetricsWriters(wanted, directory, directory.event, next_step)


@pytest.fixture
def picture(tmp_path):
    file = tmp_path / "grid.png"
    Image.new("RGB", (8, 6), (255, 0, 0)).save(file)
    return file


def test_a_training_line_has_every_key_and_null_for_what_is_not_known(tmp_path):
    writers = opened(tmp_path, [])
    writers.training({"step": 0, "loss": 1.5, "grad_norm": math.inf, "lr": 1e-3, "extra": 4})
    writers.validation(1, 2.5)
    writers.close()
    first, second = read_metrics(tmp_path)
    assert set(first) == {*METRICS, "extra", "non_finite"}
    assert first["loss"] == 1.5
    assert first["mfu"] is None
    assert first["grad_norm"] is None
    assert first["non_finite"] == {"grad_norm": "inf"}
    assert second == {"step": 1, "validation_loss": 2.5}
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_other_ranks_write_no_metrics(tmp_path):
    directory = RunDirectory(tmp_path / "run", rank=1)
    writers = MetricsWriters(recipe(tmp_path), directory, directory.event)
    writers.training({"step": 0, "loss": 1.0})
    writers.close()
    assert not (tmp_path / "run").exists()


def test_a_writer_that_is_not_installed_is_named_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(metrics.PACKAGES, "wandb", ("a_package_that_nobody_has",))
    with pytest.raises(UserError, match=r"'wandb', but a_package_that_nobody_has .* pip install 'headway\[wandb\]'"):
        require_installed(recipe(tmp_path, metrics={"writers": ["wandb"]}))


def tensorboard_points(tmp_path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    return [(point.step, pytest.approx(point.value)) for point in events.Scalars(tag)]


def test_tensorboard_shows_numbers_pictures_and_a_resumed_run_without_the_steps_that_ran_twice(tmp_path, picture):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = opened(tmp_path, ["tensorboard"])
    for step in range(6):
        writers.training({"step": step, "loss": 1.0, "grad_norm": math.nan})
    writers.picture(4, "samples", picture)
    writers.close()
    time.sleep(1.1)  # event files are ordered by the second in their names
    resumed = opened(tmp_path, ["tensorboard"], next_step=4)
    for step in range(4, 8):
        resumed.training({"step": step, "loss": 2.0})
    resumed.close()
    assert tensorboard_points(tmp_path, "loss") == [(0, 1), (1, 1), (2, 1), (3, 1), (4, 2), (5, 2), (6, 2), (7, 2)]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert "grad_norm" not in events.Tags()["scalars"], "a number that is not finite is not drawn"
    assert "recipe/text_summary" in events.Tags()["tensors"]


def test_tensorboard_keeps_the_samples(tmp_path, picture):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writers = opened(tmp_path, ["tensorboard"])
    writers.picture(4, "samples", picture)
    writers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("samples")
    assert (image.step, image.width, image.height) == (4, 8, 6)


@pytest.fixture
def fresh_wandb():
    """W&B reads its environment once a process, unless it is torn down."""
    yield
    import_module("wandb").teardown()


@needs("wandb")
@pytest.mark.usefixtures("fresh_wandb")
def test_wandb_works_without_a_network_and_a_resumed_run_is_the_same_run(tmp_path, picture, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    for next_step in (0, 3):
        writers = opened(tmp_path, ["wandb"], next_step)
        writers.training({"step": next_step, "loss": 1.0})
        writers.picture(next_step, "samples", picture)
        writers.close()
    import_module("wandb").teardown()  # as at the end of a process: W&B's own writes its file to the end
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert runs
    identifier = (tmp_path / "wandb" / "run_id").read_text()
    assert all(run.name.endswith(identifier) for run in runs)
    assert all(file.stat().st_size > 500 for file in tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    assert list(tmp_path.glob("wandb/offline-run-*/files/media/images/*.png"))


@needs("mlflow", "sqlalchemy", "alembic")
def test_mlflow_works_without_a_server_and_a_resumed_run_is_the_same_run(tmp_path, picture, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for next_step in (0, 2):
        writers = opened(tmp_path, ["mlflow"], next_step)
        for step in range(next_step, next_step + 2):
            writers.training({"step": step, "loss": float(step)})
        writers.picture(next_step, "samples", picture)
        writers.close()
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow' / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("headway").experiment_id])
    assert run.info.status == "FINISHED"
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "loss")] == [(s, s) for s in range(4)]
    assert [item.path for item in client.list_artifacts(run.info.run_id, "samples")] == ["samples/grid.png"]


@pytest.fixture
def silent_server():
    """Address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def no_server():
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


def asked_for_a_server(monkeypatch, writer: str, address: str) -> None:
    if writer == "wandb":
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
    else:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")


@pytest.mark.usefixtures("fresh_wandb")
@needs("wandb", "mlflow")
@pytest.mark.parametrize("writer", ["wandb", "mlflow"])
def test_a_server_that_is_not_there_costs_the_run_one_event(tmp_path, monkeypatch, no_server, writer, capfd):
    asked_for_a_server(monkeypatch, writer, no_server)
    monkeypatch.setattr(writer_thread, "CLOSE_TIMEOUT_S", 20.0)
    writers = opened(tmp_path, [writer])
    for step in range(3):
        writers.training({"step": step, "loss": 1.0})
    writers.close()
    writers.training({"step": 3, "loss": 1.0})
    assert [line["step"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3]
    (event,) = read_events(tmp_path)
    assert (event["kind"], event["writer"]) == ("writer_given_up", writer)
    assert event["message"].startswith(f"{writer} gets no more metrics (")
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.usefixtures("fresh_wandb")
@needs("wandb", "mlflow")
@pytest.mark.parametrize("writer", ["wandb", "mlflow"])
def test_a_server_that_never_answers_does_not_hold_the_run(tmp_path, monkeypatch, silent_server, writer):
    asked_for_a_server(monkeypatch, writer, silent_server)
    monkeypatch.setattr(writer_thread, "CLOSE_TIMEOUT_S", 0.5)
    began = time.monotonic()
    writers = opened(tmp_path, [writer])
    for step in range(3):
        writers.training({"step": step, "loss": 1.0})
    writers.close()
    assert time.monotonic() - began < 3.0
    assert [event["kind"] for event in read_events(tmp_path)] == ["writer_given_up"]


class SlowWriter:
    def __init__(self) -> None:
        self.may_go_on = threading.Event()

    def scalars(self, step, values) -> None:
        self.may_go_on.wait()

    def picture(self, step, name, file) -> None: ...

    def close(self) -> None: ...


def test_a_writer_that_is_too_far_behind_is_given_up_once(monkeypatch):
    monkeypatch.setattr(writer_thread, "CALLS_KEPT", 4)
    events, slow = [], SlowWriter()
    writer = writer_thread.WriterThread("slow", lambda: slow, lambda kind, **fields: events.append(fields["reason"]))
    for step in range(10):
        writer.call(lambda to, step=step: to.scalars(step, {}))
    assert events == ["it is 4 lines behind"]
    slow.may_go_on.set()
    writer.close()
    assert len(events) == 1


def clock(monkeypatch):
    """The clock in the test's hand: advance it with the returned function, in nanoseconds."""
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])

    def advance(nanoseconds: int) -> None:
        now[0] += nanoseconds

    return advance


def test_times_add_up_to_the_nanosecond_and_nothing_falls_between_steps(monkeypatch):
    advance = clock(monkeypatch)
    timer = StepTimer()
    for _ in range(3):
        with timer.data_wait():
            advance(100_000_001)
        advance(900_000_001)
        timer.step_done(samples=8, tokens=64)
        with timer.outside():
            advance(5_000_000_000)
        advance(7)
    times = timer.read()
    assert times.elapsed_ns == 3 * (100_000_001 + 900_000_001 + 7)
    assert times.data_wait_ns == 3 * 100_000_001
    assert times.step_time_s == pytest.approx(1.000000009, abs=1e-12)
    assert times.data_wait_s == pytest.approx(0.100000001, abs=1e-12)
    assert times.samples_per_s == pytest.approx(24 / 3.000000027)
    assert times.tokens_per_s == pytest.approx(192 / 3.000000027)
    advance(11)
    timer.step_done(samples=1)
    assert timer.read().elapsed_ns == 11, "the next reading starts where the last one ended"


def test_rates_without_a_step_are_not_invented():
    with pytest.raises(ValueError, match="no step"):
        StepTimer().read()


def allocated_and_freed(gib: float) -> tuple[float | None, float | None]:
    before = peak_memory_gib(torch.device("cpu"))
    del_me = torch.ones(int(gib * 2**28))
    del del_me
    return before, peak_memory_gib(torch.device("cpu"))


def test_the_peak_of_memory_is_seen_after_it_is_freed():
    """In a process of its own: no test before may have held more."""
    ((before, peak),) = run_ranks(1, allocated_and_freed, 0.25)
    assert peak - before == pytest.approx(0.25, abs=0.05)


def test_a_summary_of_a_run_is_what_its_lines_say(tmp_path):
    writers = opened(tmp_path, [])
    directory = RunDirectory(tmp_path)
    writers.validation(0, 4.0)
    for step in range(40):
        wait = 0.5 if step == 0 else 0.1
        writers.training(
            {
                "step": step,
                "loss": math.nan if step == 20 else 40.0 - step,
                "step_time_s": 1.0,
                "data_wait_s": wait,
                "samples": 8 * (step + 1),
                "samples_per_s": 8.0 if step else 1.0,
                "peak_memory_gib": 1.0 + step,
            }
        )
    writers.validation(40, 1.0)
    directory.event("step_skipped", step=20)
    directory.event("bad_records", step=3, records=["a: torn", "b: torn"])
    summary = summarise(tmp_path)
    assert (summary.steps, summary.samples) == (40, 320)
    assert (summary.loss_first, summary.loss_last) == (40.0, pytest.approx(5.5))
    assert (summary.validation_first, summary.validation_last) == (4.0, 1.0)
    assert summary.samples_per_s == 8.0
    assert summary.tflops_per_device is None
    assert summary.data_wait_share == pytest.approx(4.4 / 40)
    assert summary.peak_memory_gib == 40.0
    assert (summary.skipped_steps, summary.bad_records) == (1, 2)


def test_an_empty_run_has_an_empty_summary(tmp_path):
    summary = summarise(tmp_path)
    assert (summary.steps, summary.loss_first, summary.data_wait_share) == (0, None, None)


def test_lines_are_on_disk_when_the_call_returns(tmp_path):
    writers = opened(tmp_path, [])
    writers.training({"step": 0, "loss": 1.0})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 0

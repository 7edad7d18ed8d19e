"""Logs of six trainers tell stalls, slowing, losses, memory and restarts; noise and warm-up are no findings."""

import json
import random

import pytest

from headway.errors import UserError
from headway.explain import Input, InputKind, kind_of
from headway.explain.logs import explain_logs, explain_run_directories
from soak import soak
from trainer_logs import WRITERS, deepspeed, json_lines, megatron, torchtitan

STEPS = 120


def noise(spread=0.02, steps=STEPS, base=2.0, seed=1):
    """Seconds of steady steps."""
    generator = random.Random(seed)
    return [base * (1 + generator.gauss(0, spread)) for _ in range(steps)]


def losses(steps=STEPS, seed=2):
    generator = random.Random(seed)
    return [4.0 - 2.0 * step / steps + generator.gauss(0, 0.02) for step in range(steps)]


def explained(tmp_path, lines, name="train.log"):
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n")
    return explain_logs([Input(path, InputKind.LOG)])


def ids(said):
    return [finding.id for finding in said.findings]


@pytest.mark.parametrize("trainer", WRITERS)
def test_a_steady_run_of_any_trainer_is_read_and_has_no_finding(trainer, tmp_path):
    """Near miss: two percent of noise and a slow beginning."""
    seconds = [30.0, 8.0, *noise()[2:]]
    said = explained(tmp_path, WRITERS[trainer](seconds, losses(), [40.0] * STEPS))
    (log,) = said.details["logs"]
    assert (log["trainer"], log["rows"], log["last_step"]) == (trainer, STEPS, STEPS)
    assert log["step_time_s"]["median"] == pytest.approx(2.0, rel=0.01)
    assert ids(said) == []
    assert kind_of(tmp_path / "train.log") is InputKind.LOG


@pytest.mark.parametrize("trainer", WRITERS)
def test_slow_steps_of_any_trainer_are_found_with_their_period_and_what_they_cost(trainer, tmp_path):
    seconds = noise()
    for step in range(19, STEPS, 20):
        seconds[step] = 12.0
    said = explained(tmp_path, WRITERS[trainer](seconds, losses(), [40.0] * STEPS))
    (finding,) = said.findings
    assert finding.id == "log-periodic-stall"
    assert "every 20 steps" in finding.claim
    assert finding.recoverable.high_us == pytest.approx(6 * 10.0e6, rel=0.02)
    assert finding.evidence[0].count == 6


def test_slow_steps_without_a_period_are_only_slow(tmp_path):
    seconds = noise()
    for step in (17, 23, 61, 95):
        seconds[step] = 9.0
    assert ids(explained(tmp_path, megatron(seconds, losses(), [40.0] * STEPS))) == ["log-slow-steps"]


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("[titan] 2026-01-05 - root - INFO - Saving the checkpoint (or staging if async is enabled).", "checkpoint"),
        ("  saving checkpoint at iteration      20 to /data/run in torch_dist format", "checkpoint"),
        ("[GC] Performing periodic GC collection took 8.1 seconds", "garbage-collection"),
        ("(min, max) time across ranks (ms): evaluating on validation set", "validation"),
    ],
)
def test_what_happens_beside_the_slow_steps_names_their_cause(line, id, tmp_path):
    seconds = noise()
    lines = megatron(seconds, losses(), [40.0] * STEPS)
    for step in range(STEPS - 1, 18, -20):
        seconds[step] = 12.0
    lines = megatron(seconds, losses(), [40.0] * STEPS)
    for step in range(STEPS - 1, 18, -20):
        lines.insert(step, line)
    (finding,) = explained(tmp_path, lines).findings
    assert finding.id == f"log-{id}-stall"
    assert finding.confidence == "high"


def test_saving_that_does_not_stall_is_no_finding(tmp_path):
    """Near miss: asynchronous saves."""
    lines = megatron(noise(), losses(), [40.0] * STEPS)
    for step in range(STEPS - 1, 18, -20):
        lines.insert(step, "  saving checkpoint at iteration      20 to /data/run in torch_dist format")
    assert ids(explained(tmp_path, lines)) == []


@pytest.mark.parametrize(("growth", "found"), [(0.3, True), (0.01, False)])
def test_a_run_that_slows_down_is_told_beyond_noise(growth, found, tmp_path):
    seconds = [taken * (1 + growth * step / STEPS) for step, taken in enumerate(noise())]
    assert ("log-slowing-down" in ids(explained(tmp_path, json_lines(seconds, losses(), [4.0] * STEPS)))) is found


@pytest.mark.parametrize(("growth", "found"), [(0.2, True), (0.02, False)])
@pytest.mark.parametrize("writer", [torchtitan, deepspeed, json_lines])
def test_memory_that_grows_over_the_run_is_told(writer, growth, found, tmp_path):
    memory = [40.0 * (1 + growth * step / STEPS) for step in range(STEPS)]
    assert ("log-memory-growth" in ids(explained(tmp_path, writer(noise(), losses(), memory)))) is found


def test_a_peak_that_is_found_step_by_step_and_settles_is_no_growth(tmp_path):
    memory = [40.0 * (1.2 - 0.2 * 0.9**step) for step in range(STEPS)]
    assert ids(explained(tmp_path, torchtitan(noise(), losses(), memory))) == []


def test_one_slow_row_that_costs_little_is_no_finding(tmp_path):
    seconds = noise()
    seconds[70] = 6.0
    assert ids(explained(tmp_path, megatron(seconds, losses(), [4.0] * STEPS))) == []


def test_a_jump_of_the_loss_says_whether_it_came_back(tmp_path):
    back = losses()
    back[60] = 9.0
    (finding,) = explained(tmp_path, torchtitan(noise(), back, [40.0] * STEPS)).findings
    assert finding.id == "log-loss-spike"
    assert "step 61" in finding.title
    assert "comes back" in finding.title
    gone = losses()
    gone[60:] = [9.0] * (STEPS - 60)
    (finding,) = explained(tmp_path, torchtitan(noise(), gone, [40.0] * STEPS)).findings
    assert "is not back" in finding.title


@pytest.mark.parametrize("writer", [torchtitan, deepspeed, WRITERS["Hugging Face Trainer"]])
def test_a_loss_that_is_not_finite_is_told_from_its_first_step(writer, tmp_path):
    bad = losses()
    bad[80:] = [float("nan")] * (STEPS - 80)
    said = explained(tmp_path, writer(noise(), bad, [40.0] * STEPS))
    assert ids(said) == ["log-loss-not-finite"]
    assert "step 81" in said.findings[0].title


@pytest.mark.parametrize(("steps", "found"), [(range(100, 120, 4), True), (range(1, 9), False)])
def test_skipped_steps_count_only_after_the_loss_scale_is_found(steps, found, tmp_path):
    lines = megatron(noise(), losses(), [40.0] * STEPS)
    for step in steps:
        lines[step] = lines[step].replace("skipped iterations:   0", "skipped iterations:   1")
    assert ("log-skipped-steps" in ids(explained(tmp_path, lines))) is found


def test_restarts_cost_the_steps_that_are_made_again(tmp_path):
    lines = json_lines(noise(), losses(), [4.0] * STEPS)
    said = explained(tmp_path, [*lines[:60], *lines[40:]])
    assert ids(said) == ["log-restarts"]
    assert "made 20 steps again" in said.findings[0].title
    assert said.findings[0].recoverable.high_us == pytest.approx(20 * 2.0e6, rel=0.02)


@pytest.mark.parametrize(
    ("line", "id"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "log-out-of-memory"),
        ("[rank3]:[E105] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", "log-collective-timeout"),
        ("[titan] 2026-01-05 - root - WARNING - 13 CUDA memory allocation retries.", "log-allocation-retries"),
        ("[titan] 2026-01-05 - root - WARNING - 0 CUDA memory allocation retries.", None),
    ],
)
def test_lines_of_errors_become_findings(line, id, tmp_path):
    said = explained(tmp_path, [*torchtitan(noise(), losses(), [40.0] * STEPS), line])
    assert ids(said) == ([id] if id else [])


def test_rates_alone_still_tell_stalls_without_seconds(tmp_path):
    seconds = noise()
    for step in range(19, STEPS, 20):
        seconds[step] = 12.0
    lines = [line.partition("INFO - ")[2] for line in torchtitan(seconds, losses(), [40.0] * STEPS)]
    (finding,) = explained(tmp_path, lines).findings
    assert finding.id == "log-periodic-stall"
    assert finding.recoverable is None


def test_the_history_of_a_trainer_state_is_a_log(tmp_path):
    history = [{"step": 10 * step, "loss": loss, "epoch": 0.1} for step, loss in enumerate(losses(), 1)]
    history[70]["loss"] = 40.0
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps({"global_step": 1200, "log_history": [*history, {"step": 1200, "eval_loss": 2.0}]}))
    said = explain_logs([Input(path, InputKind.LOG)])
    assert ids(said) == ["log-loss-spike"]
    assert "no-times" in [message.id for message in said.health]


def write_run(folder, lines, events=()):
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return Input(folder, InputKind.RUN_DIRECTORY)


def metrics(seconds, wait=0.0, **more):
    return [
        {"step": step, "loss": loss, "step_time_s": taken, "data_wait_s": wait * taken, "peak_memory_gib": 4.0, **more}
        for step, (taken, loss) in enumerate(zip(seconds, losses(), strict=True))
    ]


def test_a_runs_wait_for_data_is_its_share_of_the_time(tmp_path):
    (finding,) = explain_run_directories([write_run(tmp_path / "waits", metrics(noise(), wait=0.4))]).findings
    assert finding.id == "log-data-wait"
    assert finding.recoverable.high_us == pytest.approx(0.4 * sum(noise()) * 1e6, rel=0.01)
    assert dict(finding.fix.recipe) == {"data.workers": 8}
    assert not explain_run_directories([write_run(tmp_path / "not", metrics(noise(), wait=0.02))]).findings


def test_a_runs_saves_are_the_cause_of_slow_steps_or_tell_their_own_stall(tmp_path):
    saves = [{"kind": "checkpoint_started", "step": step, "stall_s": 8.0} for step in range(19, STEPS, 20)]
    seconds = noise()
    for step in range(19, STEPS, 20):
        seconds[step] = 10.0
    (finding,) = explain_run_directories([write_run(tmp_path / "slow", metrics(seconds), saves)]).findings
    assert (finding.id, finding.evidence[0].count) == ("log-checkpoint-stall", 6)
    (finding,) = explain_run_directories([write_run(tmp_path / "beside", metrics(noise()), saves)]).findings
    assert finding.recoverable.high_us == pytest.approx(48.0e6)
    quick = [{**save, "stall_s": 0.01} for save in saves]
    assert not explain_run_directories([write_run(tmp_path / "quick", metrics(noise()), quick)]).findings
    last = [{"kind": "checkpoint_started", "step": STEPS, "stall_s": 30.0}]
    assert not explain_run_directories([write_run(tmp_path / "last", metrics(noise()), last)]).findings


def test_a_runs_skipped_steps_and_validations_are_read(tmp_path):
    lines = metrics(noise())
    lines.insert(50, {"step": 50, "validation_loss": 3.0})
    skipped = [{"kind": "step_skipped", "step": step} for step in (50, 60, 70)]
    said = explain_run_directories([write_run(tmp_path / "run", lines, skipped)])
    assert ids(said) == ["log-skipped-steps"]
    assert said.details["runs"][0]["rows"] == STEPS


@pytest.mark.parametrize(
    "content", [b"", b"nothing of steps\n", b'{"log_history": 3}', b'{"log_history": [', b"\xff\xfe\x00"]
)
def test_what_is_no_log_is_told_in_one_line(content, tmp_path):
    path = tmp_path / "train.log"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        explain_logs([Input(path, InputKind.LOG)])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mutations", [20, soak(1000)])
@pytest.mark.parametrize("trainer", WRITERS)
def test_mutated_logs_end_in_a_message_and_never_in_a_traceback(trainer, mutations, tmp_path):
    whole = "\n".join(WRITERS[trainer](noise(steps=30), losses(30), [4.0] * 30)).encode()
    generator = random.Random(9)
    path = tmp_path / "train.log"
    for _ in range(mutations):
        mutated = bytearray(whole if generator.random() < 0.7 else whole[: generator.randrange(len(whole))])
        for _ in range(generator.choice([1, 10, 300]) if mutated else 0):
            mutated[generator.randrange(len(mutated))] = generator.choice(b"0123456789-eE.,:|{}'\"\n\r\xff")
        path.write_bytes(mutated)
        try:
            explain_logs([Input(path, InputKind.LOG)])
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017

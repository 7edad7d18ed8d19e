"""Tuning tables tell what each change was worth beyond noise; other work, noise and disturbed rows are no speed-up."""

import random
from pathlib import Path

import pytest

from headway.errors import UserError
from headway.explain import Input, InputKind, explain, kind_of
from headway.explain.logs import explain_tables
from headway.explain.logs.work import command_flags, work_of
from soak import soak

LOGS = Path(__file__).parent.parent.parent / "shared" / "traces" / "logs"
needs_traces = pytest.mark.skipif(not LOGS.is_dir(), reason="the published tables are not here")


def explained(path):
    return explain_tables([Input(path, InputKind.TABLE)])


def table(tmp_path, *rows, heading="tps\tstatus\tdescription\tcommand", name="tried.tsv"):
    path = tmp_path / name
    path.write_text("\n".join([heading, *rows]) + "\n")
    return path


def finding(said, id):
    return next((one for one in said.findings if one.id == id), None)


def verdicts(said):
    return {row["line"]: row["verdict"] for row in said.details["tuning"][0]["rows"]}


@needs_traces
def test_the_published_b200_table_has_its_known_noise_and_gains():
    said = explained(LOGS / "torchtitan_qwen3_14b_8xb200.tsv")
    assert said.details["tuning"][0]["noise"] == pytest.approx(0.014, abs=0.0005)
    gains = finding(said, "tuning-gains")
    assert "+15.9% selective activation checkpointing" in gains.claim
    assert "+16.0% per-block compile" in gains.claim
    told = verdicts(said)
    profiled, batches, logging = (4, 11, 16, 22, 26, 45, 56, 62), (6, 10, 17, 38, 48), (51, 60)
    assert {told[line] for line in (*profiled, *batches, *logging)} == {"confounded"}
    assert "faster" not in {told[line] for line in range(42, 77) if line in told}  # all of them lie within noise
    assert finding(said, "tuning-disturbed").evidence[0].events[0] == "line 71"


@needs_traces
def test_the_published_h100_table_has_two_changes_beyond_its_own_noise():
    said = explained(LOGS / "torchtitan_llama3_8b_8xh100.tsv")
    assert [line for line, verdict in verdicts(said).items() if verdict == "faster"] == [10, 31]
    assert "+35.0% CUDAGraph" in finding(said, "tuning-gains").claim
    assert kind_of(LOGS / "torchtitan_llama3_8b_8xh100.tsv") is InputKind.TABLE


def test_a_change_counts_only_beyond_what_repeats_differ_by(tmp_path):
    path = table(
        tmp_path,
        "1000\tkeep\tbaseline\trun --a=1",
        "1030\tdiscard\trepeat of the baseline\trun --a=1",
        "1020\tkeep\tsmall change\trun --a=2",
        "1200\tkeep\tlarge change\trun --a=3",
    )
    said = explained(path)
    assert said.details["tuning"][0]["noise"] == pytest.approx(0.03)
    assert verdicts(said) == {3: "repeat", 4: "noise", 5: "faster"}
    assert finding(said, "tuning-within-noise").evidence[0].events[0] == "line 4"
    assert "--a=3" in finding(said, "tuning-gains").fix.text


@pytest.mark.parametrize(
    "command",
    [
        "run --training.seq_len=8192",
        "run --training.local_batch_size=8",
        "run --metrics.log_freq=100",
        "run --profiler.enable_profiling",
        "run --per_device_train_batch_size 8",
    ],
)
def test_other_work_is_no_speed_up_whatever_its_rate(command, tmp_path):
    said = explained(table(tmp_path, "1000\tkeep\tbaseline\trun", f"1500\tkeep\tfaster?\t{command}"))
    assert verdicts(said) == {3: "confounded"}
    assert finding(said, "tuning-gains") is None
    assert "1 of them look faster" in finding(said, "tuning-confounded").claim


def test_what_goes_on_from_other_work_is_compared_within_it(tmp_path):
    """Near miss: both of the last rows have the same sequence length."""
    path = table(
        tmp_path,
        "1000\tkeep\tbaseline\trun",
        "1500\tkeep\tlonger\trun --training.seq_len=8192",
        "1800\tkeep\tcompile\trun --training.seq_len=8192 --compile.enable",
    )
    assert verdicts(explained(path)) == {3: "confounded", 4: "faster"}


def test_descriptions_tell_other_work_where_there_is_no_command(tmp_path):
    path = table(
        tmp_path,
        "1000,keep,baseline",
        "1400,keep,sequence length 8192",
        "1300,keep,disable structured logging",
        "1250,keep,fused optimizer",
        heading="tokens_per_sec,status,description",
        name="tried.csv",
    )
    assert verdicts(explained(path)) == {3: "confounded", 4: "confounded", 5: "faster"}


def test_a_repeat_that_is_far_off_tells_of_a_disturbed_machine(tmp_path):
    rows = ["1000\tkeep\tbaseline\trun", "500\tdiscard\trepeat\trun", "1010\tdiscard\trepeat\trun"]
    said = explained(table(tmp_path, *rows))
    assert said.details["tuning"][0]["noise"] == pytest.approx(0.01)
    assert "500 in line 3" in finding(said, "tuning-disturbed").claim
    assert finding(explained(table(tmp_path, rows[0], rows[2])), "tuning-disturbed") is None


def test_a_table_of_steps_is_a_log(tmp_path):
    """As Lightning's CSVLogger writes it."""
    rows = [f"0,{step},{3.0 if step != 70 else 30.0},1e-4" for step in range(100)]
    path = table(tmp_path, *rows, heading="epoch,step,train_loss,lr", name="metrics.csv")
    assert [one.id for one in explained(path).findings] == ["log-loss-spike"]


def test_a_log_and_a_table_of_steps_are_both_told_of(tmp_path):
    steps = table(tmp_path, *(f"0,{step},3.0" for step in range(20)), heading="epoch,step,train_loss", name="steps.csv")
    log = tmp_path / "train.log"
    log.write_text("".join(f'{{"step": {step}, "loss": 2.0, "step_time_s": 1.0}}\n' for step in range(20)))
    told = explain([steps, log]).as_json()["logs"]
    assert sorted(one["file"] for one in told) == sorted([str(steps), str(log)])


def test_flags_and_work_of_a_command():
    flags = command_flags("NGPU=8 ./run.sh --a.b-c=1 --on --value 3 'x'")
    assert flags == {"NGPU": "8", "a.b_c": "1", "on": "", "value": "3"}
    assert work_of({"training.global_batch_size": "16", "compile.enable": ""}, "") == {"batch size 16"}
    assert work_of({}, "compile and fused optimizer, consequently faster") == set()


@pytest.mark.parametrize(
    "content", ["", "a\tb\tc\n", "a,b,c\n1,2,3\n", "tps,status,description\n1000,keep,x\n", "\x00\x00\n"]
)
def test_what_is_no_table_of_runs_is_told_in_one_line(content, tmp_path):
    path = tmp_path / "tried.tsv"
    path.write_text(content)
    with pytest.raises(UserError) as error:
        explained(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("mutations", [100, soak(5000)])
def test_mutated_tables_end_in_a_message_and_never_in_a_traceback(mutations, tmp_path):
    rows = [f"{1000 + 40 * n}\tkeep\tchange {n}\trun --a={n} --training.seq_len={n % 3}" for n in range(8)]
    whole = table(tmp_path, *rows).read_bytes()
    generator = random.Random(10)
    path = tmp_path / "tried.tsv"
    for _ in range(mutations):
        mutated = bytearray(whole if generator.random() < 0.7 else whole[: generator.randrange(len(whole))])
        for _ in range(generator.choice([1, 10, 60]) if mutated else 0):
            mutated[generator.randrange(len(mutated))] = generator.choice(b"0123456789-eE.,\t\"'\n\r\xff\x00")
        path.write_bytes(mutated)
        try:
            explained(path)
        except UserError as error:
            assert "\n" not in str(error)  # noqa: PT017

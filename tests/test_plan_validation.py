"""headway validate: rows become runs by what they state, measurements are held against them, bad tables are told."""

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headway.cli.main import app
from headway.cost import Estimate
from headway.errors import UserError
from headway.plan import Errors, RowResult, Run, Unmapped, case_of, read_runs, validate
from headway.plan.measured import measured_peak_memory, measured_step_time
from headway.plan.validation import regret_of

TABLE = Path(__file__).parent / "published" / "runs.csv"
"""Rows of public tables, one or two a source, as they were published (facts; each row names its source)."""
RUNS = {run.id: run for run in read_runs(TABLE)}


def sizes(case) -> dict[str, float]:
    names = ("devices", "tp", "sequence_parallel", "cp", "pp", "virtual", "ep", "micro_batch", "global_batch", "dp")
    return {name: float(getattr(case.layouts, name)[0]) for name in names}


def test_a_megatron_bridge_row():
    case = case_of(RUNS["33"])  # Llama-3.1 405B, GB300, fp8, tp 4, pp 8, 4 chunks
    expected = {"devices": 256, "tp": 4, "sequence_parallel": 1, "cp": 1, "pp": 8, "virtual": 4, "ep": 1}
    assert sizes(case) == expected | {"micro_batch": 1, "global_batch": 1536, "dp": 8}
    assert case.cluster.accelerator.name == "GB300-NVL72"
    assert case.shape.parameters() / 1e9 == pytest.approx(405.9, rel=0.01)
    assert (case.settings.precision, case.settings.data_parallel) == ("float8", "distributed_optimizer")
    assert (case.kind, case.behaviour.name) == ("dense", "bridge")
    assert measured_step_time(case) == pytest.approx(1536 * 8192 / (1048 * 256))


def test_a_mixture_with_latent_attention():
    case = case_of(RUNS["849"])  # DeepSeek-V2, 4 layers: one dense, three of experts
    assert case.kind == "mixture"
    assert [block.count for block in case.shape.blocks] == [1, 3]
    assert case.shape.blocks[1].experts.count == 160
    assert case.shape.blocks[1].attention.kv_rank == 512
    assert sizes(case)["ep"] == 8
    assert measured_peak_memory(case) == 45.63


def test_a_video_row_and_a_row_of_memory_alone():
    wan = case_of(RUNS["839"])
    assert (wan.kind, wan.settings.sequence, wan.settings.data_parallel) == ("diffusion", 37440, "fsdp")
    assert measured_step_time(wan) == pytest.approx(64 * 37440 * 0.1655e12 / (899.62e12 * 32), rel=0.01)
    lora = case_of(RUNS["2632"])  # CogVideoX 5B: 13 latent frames of 30 x 45 patches, and 226 text tokens
    assert (lora.settings.sequence, lora.settings.lora_rank) == (13 * 30 * 45 + 226, 16)
    assert sizes(lora)["micro_batch"] == 4
    assert measured_step_time(lora) is None
    assert measured_peak_memory(lora) == 46.492


def test_rows_of_pytorch_trainers():
    titan = case_of(RUNS["511"])
    assert (titan.behaviour.name, titan.settings.data_parallel) == ("torchtitan", "fsdp")
    assert titan.settings.recompute == {"half_products"}
    foundry = case_of(RUNS["295"])
    assert (foundry.settings.recompute_layers, foundry.behaviour.skips_masked) == (1.0, False)
    assert foundry.shape.tied
    assert not foundry.shape.blocks[0].gated
    deepest = case_of(RUNS["527"])  # a local batch of 8 in a pipeline: 8 micro-batches of one
    assert sizes(deepest)["micro_batch"] == 1


def test_narayanan_counts_recomputation_in_its_flops():
    case = case_of(RUNS["2717"])  # 175B on 384 devices: 153 TFLOP/s
    hidden, layers, tokens = 12288, 96, 1536 * 2048
    flops = 96 * tokens * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))
    assert measured_step_time(case) == pytest.approx(flops / (384 * 153e12))


def test_a_mapping_does_not_depend_on_what_was_measured():
    for run in RUNS.values():
        blank = Run(
            **(vars(run) | {"numbers": {k: v for k, v in run.numbers.items() if "metric" not in k and "peak" not in k}})
        )
        try:
            seen, unseen = case_of(run), case_of(blank)
        except Unmapped:
            with pytest.raises(Unmapped):
                case_of(blank)
            continue
        assert sizes(seen) == sizes(unseen)
        assert (seen.settings, seen.behaviour, seen.shape) == (unseen.settings, unseen.behaviour, unseen.shape)


def test_rows_that_cannot_be_mapped_say_why():
    reasons = {row.run.id: row.reason for row in validate(RUNS.values()).rows if row.reason}
    assert "TPU v5p" in reasons["922"]
    assert "Stable Diffusion" in reasons["906"]
    assert set(reasons) == {"922", "906"}


def test_a_framework_that_is_not_known_is_taken_as_one_that_lays_out_alike():
    like = {column: value for column, value in vars(RUNS["596"]).items() if column != "framework"}
    assert case_of(Run(framework="a trainer of our own", **like)).behaviour.name == "nemo"
    alone = like | {"numbers": like["numbers"] | {"tp": 1.0, "pp": 1.0, "ep": 1.0}}
    with pytest.raises(Unmapped, match="framework 'a trainer of our own' is not known"):
        case_of(Run(framework="a trainer of our own", **alone))
    with pytest.raises(Unmapped, match="without a network"):
        case_of(Run(framework="a trainer of our own", **(like | {"gpu": "RTX 4090"})))


def row(name: str, predicted: float, measured: float, tp: int, notes: str = "") -> RowResult:
    run = Run(name, "a source", "a model", "H100", "a framework", notes, {"precision": "bf16"}, {"num_gpus": 8.0})
    return RowResult(run, "dense", Estimate(predicted, 0.9 * predicted, 1.1 * predicted), measured, layout=(tp,))


def test_errors_and_regret_are_what_they_are_called():
    rows = [row("a", 1.0, 1.25, 1), row("b", 1.1, 1.0, 2), row("c", 2.0, 2.0, 4)]
    errors = Errors.of([(row.predicted_step_time_s, row.measured_step_time_s) for row in rows])
    assert errors.mean_absolute_percent == pytest.approx((20 + 10 + 0) / 3)
    assert errors.bias == pytest.approx((-20 + 10 + 0) / 3)
    assert (errors.median, errors.coverage) == (pytest.approx(10), pytest.approx(2 / 3))
    regret = regret_of(rows)  # a is chosen, b is the fastest
    assert (regret.groups, regret.mean_percent) == (1, pytest.approx(25))
    assert regret_of([rows[0]]) is None


def test_the_command_gives_the_contract(tmp_path):
    path = tmp_path / "result.json"
    done = CliRunner().invoke(app, ["validate", str(TABLE), "--json", str(path)])
    assert done.exit_code == 0, done.output
    result = json.loads(path.read_text())
    assert {"rows", "sources", "overall"} <= set(result)
    contract = {"id", "source", "predicted_step_time_s", "measured_step_time_s", "predicted_peak_memory_gib",
                "measured_peak_memory_gib", "reason"}  # fmt: skip
    assert all(set(row) == contract for row in result["rows"])
    assert set(result["rows"][0]["predicted_step_time_s"]) == {"value", "low", "high"}
    assert {"mean_absolute_percent", "median", "bias", "p90", "coverage", "regret"} <= set(result["overall"])
    shown = CliRunner().invoke(app, ["validate", str(TABLE)])
    assert "22 of 24 rows mapped" in shown.output
    assert "not mapped" in shown.output


def broken(tmp_path, change) -> Path:
    with TABLE.open(newline="") as file:
        rows = list(csv.reader(file))
    change(rows)
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def set_cell(rows, column: str, text: str) -> None:
    rows[1][rows[0].index(column)] = text


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda rows: set_cell(rows, "tp", "two"), "tp = 'two': write a whole number"),
        (lambda rows: set_cell(rows, "layers", "31.5"), "layers = '31.5': write a whole number"),
        (lambda rows: set_cell(rows, "peak_mem_gb", "-3"), "peak_mem_gb = '-3': write a number of 0 or more"),
        (lambda rows: set_cell(rows, "metric_mfu", "nan"), "metric_mfu = 'nan'"),
        (lambda rows: rows[0].__setitem__(rows[0].index("framework"), "trainer"), "column 'framework' is missing"),
        (lambda rows: rows[1].pop(), "not as many cells"),
        (lambda rows: rows.__delitem__(slice(1, None)), "has no rows"),
    ],
)
def test_a_bad_table_is_told_in_one_line(tmp_path, change, told):
    path = broken(tmp_path, change)
    with pytest.raises(UserError) as caught:
        read_runs(path)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_table_is_told(tmp_path):
    for content in (b"\xff\xfe\x00", b"", b"\x00\x01\x02"):
        path = tmp_path / "runs.csv"
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"runs\.csv"):
            read_runs(path)
    with pytest.raises(UserError, match="cannot be read"):
        read_runs(tmp_path / "missing.csv")

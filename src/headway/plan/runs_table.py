"""Reading a table of measured training runs: CSV with one row a run, blank where its source says nothing."""

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

from headway.errors import UserError

REQUIRED = ("id", "source", "model", "gpu", "num_gpus", "framework", "notes")
NUMBERS = (
    "params_b", "layers", "hidden", "ffn_hidden", "heads", "kv_heads", "vocab", "seq_len", "experts", "topk",
    "expert_ffn", "num_gpus", "gpus_per_node", "micro_batch", "global_batch", "tp", "pp", "vpp", "cp", "ep", "etp",
    "metric_tokens_per_s_per_gpu", "metric_tflops_per_gpu", "metric_step_time_s", "metric_mfu", "peak_mem_gb",
)  # fmt: skip
WORDS = ("precision", "sp", "dp_strategy", "recompute")
INTEGERS = set(NUMBERS) - {
    "params_b", "metric_tokens_per_s_per_gpu", "metric_tflops_per_gpu", "metric_step_time_s", "metric_mfu",
    "peak_mem_gb",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A row: its words as they stand, its numbers by column (those that are not blank)."""

    id: str
    source: str
    model: str
    gpu: str
    framework: str
    notes: str
    words: dict[str, str]
    numbers: dict[str, float]

    def whole(self, column: str, otherwise: int = 0) -> int:
        """A whole number; ``otherwise`` where the row does not say."""
        return int(self.numbers.get(column, otherwise))

    @property
    def family(self) -> str:
        """The source up to the file that it names, without line, table, version and commit."""
        words = re.split(r"@| line \d| §| table | section | figure ", self.source)[0].strip(' "').split()
        paths = [number for number, word in enumerate(words) if "/" in word]
        return " ".join(words[: paths[0] + 1] if paths else words)

    @property
    def contradicts_itself(self) -> bool:
        """Whether the table warns that its source does."""
        return "CHECK" in self.notes or "WARNING" in self.notes


def read_runs(path: Path) -> list[Run]:
    """Rows of a CSV file. Raises UserError naming file, line and column for what can't be read."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [column for column in REQUIRED if column not in (reader.fieldnames or ())]
            if missing:
                raise UserError(
                    f"{path}: column {missing[0]!r} is missing: a table of runs has {', '.join(REQUIRED)}, and as "
                    f"far as they are known {', '.join(NUMBERS[:6])}, …"
                )
            rows = [_run(path, reader.line_num, row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: not a CSV table in UTF-8: {error}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if not rows:
        raise UserError(f"{path}: the table has no rows")
    return rows


def _run(path: Path, line: int, row: dict[str, str | None]) -> Run:
    if None in row or any(row[column] is None for column in REQUIRED):
        raise UserError(f"{path}:{line}: the line has not as many cells as the table has columns")
    numbers = {}
    for column in NUMBERS:
        text = (row.get(column) or "").strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        whole = column not in INTEGERS or value == int(value if math.isfinite(value) else 0)
        if not math.isfinite(value) or value < 0 or not whole:
            kind = "a whole number" if column in INTEGERS else "a number"
            raise UserError(f"{path}:{line}: {column} = {text!r}: write {kind} of 0 or more, or leave it blank")
        if value:
            numbers[column] = value
    return Run(
        **{column: (row[column] or "").strip() for column in REQUIRED if column != "num_gpus"},
        words={column: (row.get(column) or "").strip().lower() for column in WORDS},
        numbers=numbers,
    )

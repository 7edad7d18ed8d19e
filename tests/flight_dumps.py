"""Flight-recorder dumps as PyTorch 2.13 lays them out (FlightRecorderDetail.hpp), of a job that a test describes."""

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

STARTED_NS = 1_758_610_505_000_000_000


class RecordedRank:
    """What one rank recorded; calls are added in the order the rank made them."""

    def __init__(self, rank: int, groups: dict[str, Sequence[int]]) -> None:
        self.rank = rank
        self.groups = {name: list(ranks) for name, ranks in groups.items() if rank in ranks}
        self._names = {group: str(number) for number, group in enumerate(groups)}
        self.entries: list[dict[str, Any]] = []
        self._sequence = dict.fromkeys(self.groups, 0)
        self._completed = dict.fromkeys(self.groups, 0)

    def call(
        self,
        group: str,
        name: str = "all_reduce",
        *,
        size: Sequence[int] = (16,),
        out: Sequence[int] | None = None,
        dtype: str = "BFloat16",
        done: bool = True,
        at_ms: int = 0,
        **more: Any,
    ) -> "RecordedRank":
        """A collective of ``group``: the next of its sequence."""
        self._sequence[group] += 1
        if done:
            self._completed[group] = self._sequence[group]
        self._add(
            group, f"nccl:{name}", list(size), list(size if out is None else out), dtype, done, at_ms, False, more
        )
        return self

    def message(self, group: str, kind: str, peer: int, *, done: bool = True, at_ms: int = 0) -> "RecordedRank":
        """A send to, or receive from, the global rank ``peer``."""
        own, other = self.groups[group].index(self.rank), self.groups[group].index(peer)
        arrow = "->" if kind == "send" else "<-"
        self._add(group, f"nccl:{kind} {own}{arrow}{other}", [4], [4], "BFloat16", done, at_ms, True, {})
        return self

    def _add(self, group, name, size, out, dtype, done, at_ms, point_to_point, more) -> None:
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": list(self.groups).index(group),
                "process_group": (self._names[group], group),
                "collective_seq_id": self._sequence[group],
                "p2p_seq_id": len(self.entries) if point_to_point else 0,
                "op_id": len(self.entries),
                "profiling_name": name,
                "time_created_ns": STARTED_NS + 1_000_000 * at_ms + len(self.entries),
                "input_sizes": [size],
                "input_dtypes": [dtype],
                "output_sizes": [out],
                "output_dtypes": [dtype],
                "state": "completed" if done else "scheduled",
                "time_discovered_started_ns": STARTED_NS if done else None,
                "time_discovered_completed_ns": STARTED_NS if done else None,
                "retired": done,
                "timeout_ms": 600_000,
                "is_p2p": point_to_point,
                "frames": [{"name": "train", "filename": "train.py", "line": 10 + len(self.entries)}],
                **more,
            }
        )

    def content(self) -> dict[str, Any]:
        """What the dump holds."""
        return {
            "version": "2.10",
            "nccl_version": "2.27.3",
            "pg_config": {
                self._names[group]: {"name": self._names[group], "desc": group, "ranks": str(ranks)}
                for group, ranks in self.groups.items()
            },
            "pg_status": {
                str(number): {
                    "last_enqueued_collective": self._sequence[group],
                    "last_started_collective": -1,
                    "last_completed_collective": self._completed[group],
                }
                for number, group in enumerate(self.groups)
            },
            "entries": self.entries,
        }


def recorded_job(world: int, groups: dict[str, Sequence[int]]) -> list[RecordedRank]:
    """The ranks of a job with these groups (name in the program: members)."""
    return [RecordedRank(rank, groups) for rank in range(world)]


def write_dumps(folder: Path, ranks: Sequence[RecordedRank], name: str = "_dump_{rank}") -> list[Path]:
    """One pickle a rank."""
    paths = []
    for rank in ranks:
        path = folder / name.format(rank=rank.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(rank.content(), protocol=2))
        paths.append(path)
    return paths


def as_json(content: dict[str, Any]) -> str:
    """The JSON form of a dump: numbers of the status as text, 0 for instants that are not known."""
    entries = [
        {
            key: 0 if value is None and key.startswith("time_discovered") else value
            for key, value in entry.items()
            if key != "frames"
        }
        for entry in content["entries"]
    ]
    status = {
        key: {name: str(number) for name, number in numbers.items()} for key, numbers in content["pg_status"].items()
    }
    return json.dumps({**content, "entries": entries, "pg_status": status})

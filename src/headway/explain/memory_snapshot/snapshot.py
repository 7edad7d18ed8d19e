"""A CUDA memory snapshot as it was written: segments of each device and the allocator's history.

Layout: docstring of ``torch.cuda.memory._snapshot``. Sizes are bytes, instants microseconds since 1970.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import UserError
from headway.explain.restricted_pickle import load_plain

ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")
Stack = Sequence[Any]
"""Innermost frame first, each a table with ``filename``, ``name`` and ``line``; the same object for the same stack."""


@dataclass(frozen=True, eq=False)
class Block:
    """Part of a segment; in use, or cached for later use."""

    address: int
    size: int
    active: bool
    stack: Stack


@dataclass(frozen=True, eq=False)
class Segment:
    """What one cudaMalloc gave."""

    address: int
    size: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class Action:
    """One act of the allocator."""

    what: str
    """``alloc``, ``free_requested``, ``free_completed``, ``segment_alloc``, ``segment_free``, ``segment_map``,
    ``segment_unmap``, ``oom``, ``snapshot``, …"""
    address: int
    size: int
    time_us: int | None
    stack: Stack
    device_free: int | None
    """Of an out-of-memory error: what the device had free."""


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """One device in one file."""

    path: Path
    device: int
    segments: tuple[Segment, ...]
    history: tuple[Action, ...]
    overflowed: bool
    """The file says that older history was overwritten."""
    settings: Mapping[str, Any]
    """The allocator's settings."""
    malformed: int
    """Entries that can't be read: left out."""

    @property
    def reserved(self) -> int:
        """Bytes of all segments when the snapshot was taken."""
        return sum(segment.size for segment in self.segments)

    @property
    def active(self) -> int:
        """Bytes of all blocks in use when the snapshot was taken."""
        return sum(block.size for segment in self.segments for block in segment.blocks if block.active)


def read_snapshot(path: Path) -> list[DeviceSnapshot]:
    """Read the devices of a snapshot that have a segment or a history. Raises UserError."""
    content = load_plain(path)
    if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
        raise UserError(f"{path}: not a memory snapshot: it has no list of segments")
    counted = _Counted()
    by_device: dict[int, list[Segment]] = {}
    for entry in content["segments"]:
        if segment := _segment(entry, counted):
            by_device.setdefault(max(0, _integer(entry.get("device")) or 0), []).append(segment)
    traces = _items(content.get("device_traces"))
    settings = content.get("allocator_settings")
    devices = []
    for device in sorted({*by_device, *(number for number, trace in enumerate(traces) if trace)}):
        history = [_action(entry, counted) for entry in _items(traces[device] if device < len(traces) else [])]
        devices.append(
            DeviceSnapshot(
                path=path,
                device=device,
                segments=tuple(by_device.get(device, ())),
                history=tuple(action for action in history if action is not None),
                overflowed=_overflowed(content, device),
                settings=settings if isinstance(settings, dict) else {},
                malformed=counted.malformed,
            )
        )
    if not devices:
        raise UserError(f"{path}: the memory snapshot is empty: no device has a segment or a history")
    return devices


class _Counted:
    """Entries that can't be read."""

    malformed = 0


def _segment(entry: Any, counted: _Counted) -> Segment | None:
    if not isinstance(entry, dict):
        counted.malformed += 1
        return None
    address, size = _integer(entry.get("address")), _integer(entry.get("total_size"))
    if address is None or not size or size < 0:
        counted.malformed += 1
        return None
    blocks, place = [], address
    for block in _items(entry.get("blocks")):
        extent = _integer(block.get("size")) if isinstance(block, dict) else None
        if not extent or extent < 0:
            counted.malformed += 1
            continue
        # Snapshots before 2.1 give no address: blocks follow one another.
        own = _integer(block.get("address"))
        blocks.append(Block(place if own is None else own, extent, block.get("state") in ACTIVE, _stack(block)))
        place = blocks[-1].address + extent
    return Segment(address, size, tuple(blocks))


def _action(entry: Any, counted: _Counted) -> Action | None:
    size = _integer(entry.get("size")) if isinstance(entry, dict) else None
    if size is None or size < 0:
        counted.malformed += 1
        return None
    return Action(
        what=str(entry.get("action")),
        address=_integer(entry.get("addr")) or 0,
        size=size,
        time_us=_integer(entry.get("time_us")),
        stack=_stack(entry),
        device_free=_integer(entry.get("device_free")),
    )


def _stack(entry: Mapping[str, Any]) -> Stack:
    frames = entry.get("frames")
    return frames if isinstance(frames, list) else ()


def _overflowed(content: Mapping[str, Any], device: int) -> bool:
    """``trace_alloc_overflowed``, written since PyTorch #179276: one a device."""
    said = content.get("trace_alloc_overflowed")
    if isinstance(said, list | tuple):
        return device < len(said) and said[device] is True
    if isinstance(said, dict):
        return said.get(device, said.get(str(device))) is True
    return said is True


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None

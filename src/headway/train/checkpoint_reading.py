"""Reading a checkpoint without running what it contains.

torch.distributed.checkpoint keeps its index (``.metadata``) as a pickle and plain values as more pickles. So plain
values are in ``values.json`` instead, the index is read by an unpickler that knows only the classes of an index of
tensors, and tensors are read by torch with ``weights_only=True``.
"""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from headway.errors import UserError
from headway.train.checkpoint_manifest import VALUES, read_manifest

ADMITTED = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}
"""All that the index of a checkpoint of tensors refers to, besides torch's dtypes. BytesStorageMetadata is left out on
purpose: entries of that kind are unpickled by torch without restriction."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no index of tensors needs")


class CheckpointReader(FileSystemReader):
    """DCP's reader for a checkpoint of ours. Raises UserError when its index can't be trusted."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.index = _read_index(path)

    def read_metadata(self) -> Metadata:
        """The index; without the base class's keywords, so that DCP looks for no other."""
        return self.index

    @property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Global size and dtype of each tensor by its full name."""
        return self.index.state_dict_metadata  # type: ignore[return-value]


def _read_index(path: Path) -> Metadata:
    files = read_manifest(path)["files"]
    try:
        with open(path / ".metadata", "rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata) or not all(
            isinstance(entry, TensorStorageMetadata) for entry in index.state_dict_metadata.values()
        ):
            raise pickle.UnpicklingError("it is not an index of tensors")
        if any(entry.relative_path not in files for entry in index.storage_data.values()):
            raise pickle.UnpicklingError("it points at a file that is not part of the checkpoint")
    except Exception as error:  # unpickling damaged bytes can raise almost anything
        raise UserError(f"{path / '.metadata'} is refused: {one_line(error)}") from error
    return index


def read_values(path: Path) -> dict[str, Any]:
    """The plain values of a checkpoint as they were saved (keys are strings, tuples are lists), without ranks."""
    try:
        values: dict[str, Any] = json.loads((path / VALUES).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path / VALUES} can't be read: {error}") from error
    return values


def read_full(path: Path, section: str) -> dict[str, torch.Tensor]:
    """The tensors under ``section`` (such as "model" or "ema.0.999") by name, whole and on the CPU, in one process.

    Needs no process group. Raises UserError when the checkpoint has no such section.
    """
    reader = CheckpointReader(path)
    prefix = f"{section}."
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.tensors.items()
        if name.startswith(prefix)
    }
    if not found:
        sections = ", ".join(sorted({name.split(".")[0] for name in reader.tensors}))
        raise UserError(f"{path} holds nothing under {section!r}; it has {sections}")
    fill(found, reader)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def fill(tensors: dict[str, torch.Tensor], reader: CheckpointReader, group: dist.ProcessGroup | None = None) -> None:
    """Read tensors and DTensors, by full name, in place: by all ranks of ``group``, or without ranks.

    Raises UserError on all ranks when one can't read its part.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with warnings.catch_warnings():
            # DCP warns when there are no ranks: without a group that is what is wanted.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise UserError(f"{reader.path} can't be loaded: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What went wrong in one line; for a failure that DCP gathered from the ranks, the first rank's."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"rank {rank}: {one_line(cause)}"
    return (str(error) or type(error).__name__).splitlines()[0]

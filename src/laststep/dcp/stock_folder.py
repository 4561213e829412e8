"""A folder of torch's own storage as DCP sees it, read without running any code stored in it.

Its metadata is a pickle, which is parsed by hand (`importing.dcp_metadata`). Tensors and values are
loaded as with `torch.load(weights_only=True)`, unless pickles are allowed. Nothing in it has a
digest, so nothing is verified.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from laststep.adapters.export.dcp import tensor_metadata
from laststep.adapters.importing import dcp_folder, dcp_metadata
from laststep.adapters.importing.dcp_folder import DcpFileReader, RegionBox, checked_chunk
from laststep.adapters.importing.dcp_metadata import CutTensor
from laststep.dcp import values as dcp_values
from laststep.dcp.content import put_whole
from laststep.errors import CorruptError, NotFoundError
from laststep.state.tensors import TORCH_DTYPES
from laststep.storage.registry import local_path

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem


def is_stock_folder(path: str) -> bool:
    """Return True if torch's own storage has finished a save there, with collectives or without."""
    folder = local_path(path)
    return folder is not None and dcp_folder.metadata_in(Path(folder)) is not None


def was_saved_after(path: str, moment_s: float) -> bool:
    """Return True if torch's own storage has saved there later than `moment_s`."""
    folder = local_path(path)
    told = None if folder is None else dcp_folder.metadata_in(Path(folder))
    return told is not None and told.stat().st_mtime > moment_s


def remove(path: str) -> None:
    """Delete the files of torch's own storage, starting with the metadata that identifies them."""
    folder = local_path(path)
    if folder is not None:
        for pattern in (dcp_folder.METADATA_NAME, "__*.metadata", "__*_*.distcp"):
            for file in Path(folder).glob(pattern):
                file.unlink(missing_ok=True)


class StockFolder:
    """The content of a folder of torch's own storage, with the methods of `DcpContent`."""

    save_id: str | None = None

    def __init__(self, path: str, *, rank: int, allow_pickle: bool) -> None:
        self._folder = Path(local_path(path) or path)
        self._allow_pickle = allow_pickle
        told = dcp_folder.metadata_in(self._folder, rank)
        if told is None:
            raise NotFoundError(
                f"rank {rank} has not saved anything here",
                where=path,
                found="ranks that saved separately",
                remedy="load with as many ranks as have saved",
            )
        in_parts = told.name != dcp_folder.METADATA_NAME
        data = told.read_bytes()
        self._entries = dcp_metadata.decode(data, where=str(told), in_parts=in_parts)
        self._dtypes = {
            entry.name: entry.content.dtype
            for entry in self._entries
            if isinstance(entry.content, CutTensor)
        }

    def close(self) -> None:
        """Do nothing: no file is kept open."""

    def metadata(self) -> Metadata:
        """Return the metadata for DCP's planners; the storage info of each chunk is a
        `RegionBox`."""
        paths = {entry.name: entry.path for entry in self._entries}
        metadata = Metadata(state_dict_metadata={}, planner_data=paths, storage_data={})
        metadata.version = CURRENT_DCP_VERSION
        for name, content in ((entry.name, entry.content) for entry in self._entries):
            if not isinstance(content, CutTensor):
                metadata.state_dict_metadata[name] = BytesStorageMetadata()
                there = RegionBox(name=name, region=content, box=None)
                metadata.storage_data[MetadataIndex(name)] = there
                continue
            chunks = [
                ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))
                for box, _ in content.chunks
            ]
            told = tensor_metadata(content.dtype, content.shape, chunks)
            metadata.state_dict_metadata[name] = told
            for number, (box, region) in enumerate(content.chunks):
                index = MetadataIndex(name, box.start, number)
                metadata.storage_data[index] = RegionBox(name=name, region=region, box=box)
        return metadata

    def read(
        self, plan: LoadPlan, planner: LoadPlanner, stored: dict[MetadataIndex, RegionBox]
    ) -> None:
        """Deliver everything that the plan requests to the planner; each piece is read once, in the
        order of the files."""

        def place(request: ReadItem) -> tuple[str, int, str]:
            piece = stored[request.storage_index]
            # In a safetensors file all tensors have the same offset, so add the index.
            return piece.region.file, piece.region.offset, str(request.storage_index)

        wanted = sorted(plan.items, key=place)
        for name, of_file in groupby(wanted, key=lambda request: place(request)[0]):
            path = self._folder / name
            try:
                file = path.open("rb")
            except FileNotFoundError as error:
                raise CorruptError(
                    "a file of the checkpoint is missing",
                    where=str(path),
                    remedy="put the files of all ranks into the folder",
                ) from error
            with file:
                size = path.stat().st_size
                reader = DcpFileReader(file=file, size_bytes=size, where=str(path))
                for _, requests in groupby(of_file, key=place):
                    self._give(list(requests), stored, reader, planner)

    def _give(
        self,
        requests: list[ReadItem],
        stored: dict[MetadataIndex, RegionBox],
        reader: DcpFileReader,
        planner: LoadPlanner,
    ) -> None:
        piece = stored[requests[0].storage_index]
        if piece.box is None:
            reader.file.seek(piece.region.offset)
            data = reader.file.read(piece.region.size_bytes)
            for request in requests:
                fqn, allowed = piece.name, self._allow_pickle
                planner.load_bytes(
                    request, dcp_values.raw_bytes(data, fqn=fqn, allow_pickle=allowed)
                )
            return
        like = torch.empty(0, dtype=TORCH_DTYPES[self._dtypes[piece.name]])
        tensor = checked_chunk(reader.tensor(piece), like, piece, reader.where)
        for request in requests:
            put_whole(tensor, request, planner)

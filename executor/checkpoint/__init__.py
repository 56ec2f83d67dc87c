"""Checkpoints: files with a precomputed layout, written with direct I/O, and valid only when they are durable."""

from executor.checkpoint.engine import CheckpointEngine, Outcome
from executor.checkpoint.files.flusher import Flusher, ring_of
from executor.checkpoint.files.system_calls import CheckpointError, DamagedError, Files
from executor.checkpoint.files.writer import ShardWriter
from executor.checkpoint.format.layout import Entry, Layout, boxes, layout
from executor.checkpoint.format.manifest import Manifest, tensors_of
from executor.checkpoint.format.reader import Checkpoint, ReadRequest
from executor.checkpoint.levels import Level, Levels
from executor.checkpoint.places.folder import FolderPlace
from executor.checkpoint.places.locating import checkpoint_at, place_at
from executor.checkpoint.places.place import newest_of
from executor.checkpoint.source import Slice

__all__ = [
    "Checkpoint",
    "CheckpointEngine",
    "CheckpointError",
    "DamagedError",
    "Entry",
    "Files",
    "Flusher",
    "FolderPlace",
    "Layout",
    "Level",
    "Levels",
    "Manifest",
    "Outcome",
    "ReadRequest",
    "ShardWriter",
    "Slice",
    "boxes",
    "checkpoint_at",
    "layout",
    "newest_of",
    "place_at",
    "ring_of",
    "tensors_of",
]

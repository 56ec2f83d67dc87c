"""Checkpoints: files whose layout is known beforehand, written past the page cache, acknowledged only when durable."""

from executor.checkpoint.engine import CheckpointEngine, Member, Outcome, Slice
from executor.checkpoint.files import CheckpointError, DamagedError, Files
from executor.checkpoint.flusher import Flusher, ring_of
from executor.checkpoint.layout import Entry, Layout, boxes, layout
from executor.checkpoint.levels import Level, Levels
from executor.checkpoint.manifest import Manifest, Part, tensors_of
from executor.checkpoint.places import checkpoint_at, store_at
from executor.checkpoint.promotion import promote
from executor.checkpoint.reader import Checkpoint, Wanted
from executor.checkpoint.retention import Found
from executor.checkpoint.store import Store
from executor.checkpoint.writer import ShardWriter

__all__ = [
    "Checkpoint",
    "CheckpointEngine",
    "CheckpointError",
    "DamagedError",
    "Entry",
    "Files",
    "Flusher",
    "Found",
    "Layout",
    "Level",
    "Levels",
    "Manifest",
    "Member",
    "Outcome",
    "Part",
    "ShardWriter",
    "Slice",
    "Store",
    "Wanted",
    "boxes",
    "checkpoint_at",
    "layout",
    "promote",
    "ring_of",
    "store_at",
    "tensors_of",
]

"""Checkpoints: files whose layout is known beforehand, written past the page cache, acknowledged only when durable."""

from executor.checkpoint.engine import CheckpointEngine, Member, Outcome, Slice
from executor.checkpoint.files import CheckpointError, DamagedError, Files
from executor.checkpoint.flusher import Flusher, ring_of
from executor.checkpoint.layout import Entry, Layout, boxes, layout
from executor.checkpoint.manifest import Manifest, Part
from executor.checkpoint.reader import Checkpoint, Wanted
from executor.checkpoint.store import Found, Store
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
    "Manifest",
    "Member",
    "Outcome",
    "Part",
    "ShardWriter",
    "Slice",
    "Store",
    "Wanted",
    "boxes",
    "layout",
    "ring_of",
]

"""Checkpoints: files whose layout is known beforehand, written past the page cache, acknowledged only when durable."""

from executor.checkpoint.files import CheckpointError, Files
from executor.checkpoint.flusher import Flusher
from executor.checkpoint.layout import Entry, Layout, boxes, layout
from executor.checkpoint.manifest import Manifest, Part
from executor.checkpoint.reader import Checkpoint
from executor.checkpoint.store import Found, Store
from executor.checkpoint.writer import ShardWriter

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Entry",
    "Files",
    "Flusher",
    "Found",
    "Layout",
    "Manifest",
    "Part",
    "ShardWriter",
    "Store",
    "boxes",
    "layout",
]

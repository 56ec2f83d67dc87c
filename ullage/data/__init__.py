"""Text, chat and instructions in files: from lines to batches with loss masks, and a loss by target tokens."""

from ullage.data.batches import DataBatch as DataBatch
from ullage.data.source import Data as Data

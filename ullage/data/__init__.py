"""Text, chat and instructions from files: batches with loss masks, and a mean loss over target tokens."""

from ullage.data.batches import DataBatch as DataBatch
from ullage.data.source import Data as Data

"""Makes a plan happen: an unmodified model and its own training loop, driven by the schedule that was simulated."""

from executor.gradients import GradientError
from executor.machine import LaneError
from executor.memory import DeviceMemoryError
from executor.prepare import OffloadedAdamW, prepare_session
from executor.session import MeasuredMemory, Session, SessionOptions

__all__ = [
    "DeviceMemoryError",
    "GradientError",
    "LaneError",
    "MeasuredMemory",
    "OffloadedAdamW",
    "Session",
    "SessionOptions",
    "prepare_session",
]

"""Capture of any ``nn.Module``: operators with FLOP, bytes and saved activations, without allocating its memory."""

from ullage.capture.module import capture, capture_module

__all__ = ["capture", "capture_module"]

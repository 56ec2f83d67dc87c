"""Capture of any ``nn.Module``: its operators, with FLOP, bytes and saved activations, and not a byte of its memory."""

from ullage.capture.module import capture, capture_module

__all__ = ["capture", "capture_module"]

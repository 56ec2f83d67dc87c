"""Metrics, launchers, trainers and configurations of other projects."""

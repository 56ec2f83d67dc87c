"""Integrations with other programs: metrics, trainers, and configurations of DeepSpeed."""

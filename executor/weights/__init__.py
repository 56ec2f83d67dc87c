"""Loads weights from files of ``transformers`` and ``peft`` under a plan, and saves them."""

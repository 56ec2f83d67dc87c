"""The format of a checkpoint: the layout of its files, the manifest that commits them, and their reader."""

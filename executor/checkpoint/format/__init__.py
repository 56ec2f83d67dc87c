"""A checkpoint's files: how state is laid out in them, the manifest that commits them, and reading."""

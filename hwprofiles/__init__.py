"""Hardware profiles: schema and packaged data. This package imports none of the others."""

__version__ = "0.1.0"
"""Version of the whole distribution. It is here because all other packages may import this one."""

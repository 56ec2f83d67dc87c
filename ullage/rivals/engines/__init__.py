"""Other engines: one a file, with what it decides and where its schedule differs from ours."""

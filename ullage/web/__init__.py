"""A page that answers "what would it take?": see :mod:`ullage.web.app`. It uses only the public names of ``ullage``."""

"""Examples of property tests: the same everywhere in ``make test``, new ones each time in ``make fuzz``."""

from hypothesis import settings

# A change is judged by the same examples on every machine; what nobody thought of is looked for at leisure.
settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("fuzz", derandomize=False, deadline=None, print_blob=True)
settings.load_profile("same")

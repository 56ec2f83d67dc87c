"""Results as sections, and what renders them: the terminal, and one HTML page."""

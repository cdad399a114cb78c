"""Pages about runs: what was trained, how it went, and what the model finds."""

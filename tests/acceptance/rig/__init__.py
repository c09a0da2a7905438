"""Languages with their validators, constraints that cost much, and proposers of drafts. Knows no scenario."""

"""Commands that people run, and models do not import: compare, bench, estimate, profile-swap,
doctor."""

"""weighting."""

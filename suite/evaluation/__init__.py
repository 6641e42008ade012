"""Measure confirmed runs, and what they started from, with lm-eval."""

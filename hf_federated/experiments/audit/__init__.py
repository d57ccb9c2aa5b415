"""Audits of a recipe: attacks on what simulated clients send."""

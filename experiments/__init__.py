"""Experiments: each is a set of options and a call."""

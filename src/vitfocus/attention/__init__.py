"""Readings: what the attention of a model does, without storing maps that are not needed."""

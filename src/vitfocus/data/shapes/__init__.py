"""Shapes, the built-in data set."""

"""Shapes, the embedded data set."""

"""The data sets: Shapes, which is built in, and readers of data sets on disk."""

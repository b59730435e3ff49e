"""The data sets: Shapes, which is embedded, and readers for what lies on disk."""

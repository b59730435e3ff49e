"""Statistics of attention maps."""

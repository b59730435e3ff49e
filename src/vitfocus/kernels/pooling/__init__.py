"""Token-aware Average Pooling."""

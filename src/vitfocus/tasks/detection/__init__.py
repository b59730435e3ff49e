"""Detection and instance segmentation."""

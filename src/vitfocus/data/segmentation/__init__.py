"""Images with masks."""

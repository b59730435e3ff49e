"""Context Broadcasting."""

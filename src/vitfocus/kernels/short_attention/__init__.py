"""Attention among at most 128 tokens."""

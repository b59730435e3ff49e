"""Showing: what a person would rather look at than read."""

"""Figures as SVG text: no plotting library, colours from the page, text that stays text."""

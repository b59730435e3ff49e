"""Basics that all packages use: errors, files, records, tables, progress, devices, processes."""

__version__ = "0.1.0"

"""The basics that every room uses: errors, files, tables, progress, devices."""

__version__ = "0.1.0"

"""Showing: what a person would rather look at than read.

`report` makes one page about run folders; `explore` makes a page on which to point at patches of photographs.
"""

from vitfocus.report.build import report
from vitfocus.report.explorer import explore

__all__ = ["explore", "report"]

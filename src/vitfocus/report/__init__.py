"""Reports: one HTML page about run folders (`report`), and a page to explore attention with (`explore`)."""

from vitfocus.report.build import WrittenReport, report
from vitfocus.report.explorer import explore

__all__ = ["WrittenReport", "explore", "report"]

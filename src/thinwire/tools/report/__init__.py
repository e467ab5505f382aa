"""Reports of comparisons: one HTML file that opens without a network, or a picture.

Records go in (`thinwire.tools.compare.records`), nothing else. `figures` writes pages of other plots.
"""

from __future__ import annotations

from thinwire.tools.report.comparison import write
from thinwire.tools.report.picture import picture

__all__ = ["picture", "write"]

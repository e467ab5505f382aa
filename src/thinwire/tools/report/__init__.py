"""Reports of comparisons: one HTML file that opens without a network, or a picture.

Records go in (`thinwire.tools.compare.records`), nothing else. `page` is the part that writes self-contained
pages with Plotly plots and tables; others may use it, too.
"""

from __future__ import annotations

from thinwire.tools.report.comparison import write
from thinwire.tools.report.picture import picture

__all__ = ["picture", "write"]

"""The command line and what it needs: comparisons, reports, the lab, workloads."""

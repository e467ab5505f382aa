"""What is trained in comparisons and reproductions: real data and the usual small models."""

from thinwire.tools.workloads.data import Dataset, load
from thinwire.tools.workloads.models import MODELS, build

__all__ = ["MODELS", "Dataset", "build", "load"]

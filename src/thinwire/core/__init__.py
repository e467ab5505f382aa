"""What an author of a method needs: the Exchange and what it works with."""

from thinwire.core import checks
from thinwire.core.channel import Channel, StepContext
from thinwire.core.config import HostWaits
from thinwire.core.exchange import Exchange, State, hint, momentum, own, replicated, residual, shared
from thinwire.core.layout import Layout, Slot
from thinwire.core.traits import Traits
from thinwire.net.costs import Link

__all__ = [
    "Channel",
    "Exchange",
    "HostWaits",
    "Layout",
    "Link",
    "Slot",
    "State",
    "StepContext",
    "Traits",
    "checks",
    "hint",
    "momentum",
    "own",
    "replicated",
    "residual",
    "shared",
]

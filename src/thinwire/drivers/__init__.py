"""Runs coroutines: on a process group (blocking or in lanes), in lock-step, or on a simulated network."""

from thinwire.drivers.blocking import Blocking
from thinwire.drivers.direct import Direct
from thinwire.drivers.lanes import Lanes
from thinwire.drivers.lockstep import Lockstep
from thinwire.drivers.simulated import Simulated

__all__ = ["Blocking", "Direct", "Lanes", "Lockstep", "Simulated"]

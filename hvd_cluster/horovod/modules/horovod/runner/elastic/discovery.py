"""Ways to find the hosts of an elastic job."""

from executors import FixedHosts, HostDiscovery, HostDiscoveryScript

__all__ = ["FixedHosts", "HostDiscovery", "HostDiscoveryScript"]

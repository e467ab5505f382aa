"""The network: frames, costs, links, meters, private groups and what runs on them."""

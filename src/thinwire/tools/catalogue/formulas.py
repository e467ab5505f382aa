"""What each method hands over in a step, as a formula: read by people, evaluated by tests/docs.

In bytes per step and worker, frame headers apart, for one tensor of n entries that is not too small for the
method, between few workers (where methods gather). Names are the method's options, and:

- n: entries; rows, cols: of a weight seen as a matrix; itemsize: bytes of an entry
- k: entries that are sent, max(1, ratio * n) or so
- hashes, columns: of a sketch; fetched: entries that are then asked for exactly
- index_bytes(n, k): the shortest code of k places among n: raw, a bitmap, or Elias-Fano
"""

from __future__ import annotations

# "varies: ..." where chance or the data decide: `payload_bytes` is then None.
FORMULAS = {
    "dense": "itemsize * n",
    "fp16": "2 * n",
    "bf16": "2 * n",
    "heavyball": "itemsize * n",
    "topk": "index_bytes(n, k) + 4 * k",
    "gaussiank": "varies: index_bytes(n, k) + 4 * k with k about ratio * n",
    "randomk": "4 * k",
    "threshold": "varies: index_bytes(n, k) + 4 * k with k entries above the value",
    "dgc": "index_bytes(n, k) + 4 * k",
    "scalecom": "index_bytes(n, k) + 4 * k",
    "sketched": "4 * (hashes * columns + fetched)",
    "randomblock": "4 * k",
    "qsgd": "ceil(n * bits / 8) + 4 * ceil(n / bucket)",
    "terngrad": "ceil(n / 4) + 4",
    "natural": "n + 1",
    "signsgd": "ceil(n / 8) + 4",
    "efsign": "ceil(n / 8) + 4",
    "onebit": "ceil(n / 8) + 8",
    "gspar": "varies: the places and values of about ratio * n entries",
    "powersgd": "4 * min(rank, rows, cols) * (rows + cols)",
    "a2sgd": "8",
    "lag": "1 + 4 * n",
    "lasg": "1 + 4 * n",
    "laq": "1 + ceil(n * bits / 8) + 4",
    "slaq": "1 + ceil(n * bits / 8) + 4",
    "localsgd": "itemsize * n / every",
    "spasgd": "itemsize * n / groups",
    "pqasgd": "(ceil(n * bits / 8) + 4 * ceil(n / bucket)) / every",
    "diloco": "itemsize * n / every",
}
# What the formula leaves out, or holds for.
REMARKS = {
    "a2sgd": "and itemsize * n every average_every steps",
    "scalecom": "of the leader; the others 4 * k",
    "lag": "when all upload; 1 for who skips",
    "lasg": "when all upload; 1 for who skips",
    "laq": "when all upload; 1 for who skips",
    "slaq": "when all upload; 1 for who skips",
    "warmup": "that of its method, once the dense steps are over",
    "route": "that of each tensor's method",
    "periodic": "that of its exchange, every so many steps",
    "spasgd": "on average",
}


def formula(name: str) -> str:
    """The formula and its remark; "-" for a method of a third party that has none."""
    parts = [FORMULAS.get(name), REMARKS.get(name)]
    return ", ".join(part for part in parts if part) or "-"

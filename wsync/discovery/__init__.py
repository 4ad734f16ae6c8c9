"""One probe per vendor or platform: each reads what its source says into the records of `wsync.topology`.

A probe is a function that returns a `Topology` of what it found, empty where there is nothing of its kind. It refuses
what it cannot read (`ProbeError`) and says in `notes` what it did not believe; it never fills a gap with a guess.
"""

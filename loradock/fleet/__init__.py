"""Many machines: who is there and what is wanted, in etcd, and a picker in front of the docks.

A dock is a LoRADock server with `--join`. Nothing of this package is imported without it.
"""

"""Prefix KV shared between replicas: one store of canonical pages per host.

keys       which pages a prompt has, as digests
index      which pages are held, and which go first; pure
memory     the shared memory that pages lie in
shelves    index and memory together, as one lock guards them
preparing  that memory at a replica, before its pages come
local      serves this host's replicas
remote     serves, and asks, other hosts' stores
client     the end inside an engine's process
"""

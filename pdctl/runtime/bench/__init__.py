"""The prompt-length sweep (DESIGN §8): each engine alone against every P/D pair.

settings   what was asked, checked before anything is sent
columns    which paths through the cluster are measured, and what each must import
prompts    texts of exactly n tokens, never reused
client     one streaming request, timed
status     the router's counters before and after
machine    steal, load, versions
measure    the order of it all
summary    pure arithmetic: from samples to points
report     tables and files
"""

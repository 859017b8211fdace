"""The prompt-length sweep (DESIGN §8): each engine alone against every P/D pair.

settings   what was asked, checked before anything is sent
target     the running cluster; links: what its pairs' links carry
columns    which paths through it are measured, and what each must import
prompts    texts of exactly n tokens, never reused
client     one streaming request, timed; events: its stream's format
status     the router's counters before and after
machine    steal, load, versions; strangers: processes of others on the GPU
measure    the order of it all
session    one sweep, until it is done or interrupted; watch: its progress
goodput    requests per second within the objectives
summary    pure arithmetic: from samples to points; marks: what makes a point doubtful
report     tables; terminal: as it shows them; page: the report as HTML, of plots (SVG) and
           markup (escaped)
folder     result files, written whole; resume: which of them need not be measured again;
           compare: two folders side by side
"""

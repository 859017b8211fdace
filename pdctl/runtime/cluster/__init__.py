"""One launched cluster, seen from outside: its record, keys, lock, logs, and its keeper."""

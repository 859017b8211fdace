"""The OpenAI-compatible router: one process, aiohttp on both sides (DESIGN §7).

app.py        HTTP in: routes, access, error objects
request.py    a client's body, checked before anything is scheduled (pure)
policy.py     which path a request takes (pure)
members.py    the router's picture of replicas and pairs
relay.py      one request from first byte to last: attempts, retry, headers
attempt.py    one try on one path: both legs, deadline, first event, end
legs.py       one POST to one engine, errors translated
stream.py     server-sent events, complete ones only
blame.py      which of several failures the client is told (pure)
aborts.py     ends what engines still run for a request that is over
canary.py     a real generation through every path before it takes traffic
probes.py     active health checks, passive marks
link.py       the agent's Unix socket
recent.py, advice.py     the latest failures with what to do, and what is in flight
home.py, page.html       the status page at /
status.py, metrics.py    what /status and /metrics show
"""

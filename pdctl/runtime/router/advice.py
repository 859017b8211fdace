"""What to do about a failure, by its cause; `docs/errors.md` says it at length."""

from __future__ import annotations

HINTS = {
    "over_budget": "raise handoff.buffer_bytes, or send shorter prompts",
    "queue_full": "raise handoff.buffer_bytes, add a prefill replica, or send less at once",
    "expired": "raise handoff.timeout_s or handoff.buffer_bytes where prompts wait long; "
    "`pdctl doctor {cluster}` measures the link",
    "cancelled": "an end was told to stop; `pdctl logs {cluster} {replica}` says by whom",
    "peer_lost": "`pdctl ps {cluster}` shows who is away, `pdctl doctor {cluster}` tests the link",
    "ticket": "a host's clock may have been set (`pdctl ps {cluster}` shows clocks), or somebody "
    "else dialled the data port",
    "contract": "`pdctl validate` on the topology names the field that differs",
    "tokens": "the two engines render or tokenise this prompt differently; send token ids, or "
    "compare their versions",
    "protocol": "bytes were changed on the way, or the ends run different pdctl versions; "
    "`pdctl doctor {cluster}` compares them",
    "handoff": "`pdctl logs {cluster}` has the cause: of the replica that the message names last",
    "replica_down": "`pdctl ps {cluster}` shows its state; it is restarted by itself",
    "replica_lost": "`pdctl logs {cluster} {replica}` shows how it ended; it is restarted by "
    "itself",
    "truncated": "`pdctl logs {cluster} {replica}` shows how it ended; the client has part of "
    "an answer and must ask again",
    "deadline": "raise handoff.timeout_s, or stream: every event of a stream is progress",
    "bad_answer": "what listens at that replica's port is not its engine, or another version",
    "engine_error": "its own words are in `pdctl logs {cluster} {replica} router`",
    "path_not_ready": "drop the x-pdctl-path header, or wait: `pdctl ps {cluster}` shows states",
    "nothing_ready": "`pdctl ps {cluster}` shows why no path is ready",
    "router_stopped": "the cluster was taken down or changed; ask again",
    "router_draining": "the router is being restarted; ask again in a moment",
    "internal_error": "this is a fault of pdctl; `pdctl logs {cluster} router` has the traceback",
}


def hint_for(cause: str, cluster: str, replica: str | None) -> str | None:
    """A sentence for a person who runs the cluster; None where nothing useful can be said."""
    hint = HINTS.get(cause)
    if hint is None:
        return None
    return hint.format(cluster=cluster, replica=replica or "router")

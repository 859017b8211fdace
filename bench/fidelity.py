"""How far the KV that a prefill replica sends lies from what transformers computes.

A real prefill replica of each engine computes each prompt and hands it over to a receiver of
this program, which keeps the pages. transformers computes the same token ids in float32, with
plain attention, in one forward. Compared are all positions of all layers, K and V apart:

- absolute: the largest difference of one value;
- relative: the largest difference as a part of transformers' value, or of the root mean square
  of that layer's K or V where that is more: nearer to zero, two computations in float32 differ
  by more than rounding does, and matter less;
- same: the share of 16-bit patterns that are exactly transformers' values rounded.

Rounding to float16 alone moves a value by up to 2^-11 of it, 0.000488. The bound on the relative
difference is a quarter more, which is what two computations in float32 may differ by.

    python bench/fidelity.py [--engine NAME]... [--tokens N]... [--model DIR] [--output DIR]

Without --engine: every one that has its environment here. Without --model: the demo model
(`pdctl demo-model`) and a tiny random checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from setting import RESULTS, machine, models, write
from tokenizers import Tokenizer

# `setting` has put the tests into the path
from e2e.prompts import exact_prompt  # isort: skip
from engines.own_ends import Capture, captured  # isort: skip
from engines import replicas, sglang_replicas, vllm_replicas  # isort: skip
from engines.replicas import Process, contract_of  # isort: skip

from pdctl.handoff.page import PageGeometry, unpack
from pdctl.topology.contract import Contract
from pdctl.topology.model import Role

PROMPT_TOKENS = (51, 129, 700)
SEED = 4
CHUNK_TOKENS = 256
"""The longest prompt is computed in three chunks."""
BOUND_RELATIVE = 1.25 * 2.0**-11
REFERENCE = Path(__file__).with_name("transformers_kv.py")

Floats = NDArray[np.float32]


class Source(NamedTuple):
    """How one engine's prefill replica is started, beyond what all of them take."""

    process: type[Process]
    python: Path
    options: dict[str, Any]


SOURCES = {
    "vllm": Source(
        vllm_replicas.VllmProcess,
        vllm_replicas.PYTHON,
        {"max_num_batched_tokens": CHUNK_TOKENS},
    ),
    "sglang": Source(
        sglang_replicas.SglangProcess,
        sglang_replicas.PYTHON,
        {"chunked_prefill_size": CHUNK_TOKENS},
    ),
    "mlx": Source(Process, Path(replicas.PYTHON), {"prefill_step_size": CHUNK_TOKENS}),
}


class Prompt(NamedTuple):
    text: str
    token_ids: list[int]


class Reference(NamedTuple):
    """transformers' own of one prompt."""

    kv: Floats
    """`[layers, 2, tokens, kv_heads, head_dim]`."""
    first_token: int


def prompts_of(model_dir: Path, lengths: Sequence[int]) -> list[Prompt]:
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    texts = [exact_prompt(model_dir, tokens, SEED) for tokens in lengths]
    return [Prompt(text, tokenizer.encode(text).ids) for text in texts]


def references(
    python: Path, model_dir: Path, prompts: Sequence[Prompt], scratch: Path
) -> tuple[list[Reference], dict[str, str]]:
    """What transformers computes, and its versions."""
    asked, out = scratch / "prompts.json", scratch / "reference.npz"
    asked.write_text(json.dumps([prompt.token_ids for prompt in prompts]))
    argv = [str(python), str(REFERENCE), str(model_dir), str(asked), str(out)]
    done = subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True)
    with np.load(out) as arrays:
        found = [
            Reference(arrays[f"kv{at}"], int(arrays[f"first{at}"])) for at in range(len(prompts))
        ]
    return found, json.loads(done.stdout)


@contextmanager
def prefill_replica(engine: str, model_dir: Path, contract: Contract) -> Iterator[Process]:
    source = SOURCES[engine]
    with (
        # short, because a Unix socket's path must be
        tempfile.TemporaryDirectory(dir="/tmp", prefix="pdctl-f") as folder,
        source.process(
            Path(folder), "p0", Role.PREFILL, model_dir, contract, **source.options
        ) as prefill,
    ):
        prefill.await_ready()
        yield prefill


def body_of(prompt: Prompt) -> dict[str, Any]:
    return {
        "model": vllm_replicas.MODEL_NAME,
        "prompt": prompt.text,
        "temperature": 0,
        "pdctl_cache": False,
        "cache_salt": f"{len(prompt.token_ids)} tokens",
    }


def compared(sent: NDArray[np.uint16], reference: Floats) -> dict[str, float]:
    """Of one layer's K or V: float16 patterns and transformers' values, of one shape."""
    apart = np.abs(sent.view(np.float16).astype(np.float32) - reference)
    usual = np.sqrt(np.mean(np.square(reference)))
    same = sent == reference.astype(np.float16).view(np.uint16)
    return {
        "absolute": round(float(apart.max()), 7),
        "relative": round(float((apart / np.maximum(np.abs(reference), usual)).max()), 7),
        "same": round(float(same.mean()), 7),
    }


def layers_of(
    capture: Capture, geometry: PageGeometry, reference: Reference
) -> list[dict[str, dict[str, float]]]:
    halves = unpack(geometry, capture.pages, reference.kv.shape[2])
    return [
        {
            name: compared(half[layer], reference.kv[layer, at])
            for at, (name, half) in enumerate(zip(("k", "v"), halves, strict=True))
        }
        for layer in range(geometry.layers)
    ]


def measured(
    engine: str, model_dir: Path, prompts: Sequence[Prompt], expected: Sequence[Reference]
) -> dict[str, Any]:
    contract = contract_of(model_dir)
    geometry = PageGeometry.of(contract)
    found = []
    with prefill_replica(engine, model_dir, contract) as prefill:
        ready = prefill.agent.ready
        assert ready is not None
        for prompt, reference in zip(prompts, expected, strict=True):
            capture = captured(prefill, "/v1/completions", body_of(prompt), prompt.token_ids)
            found.append(
                {
                    "prompt_tokens": len(prompt.token_ids),
                    "first_token_equal": capture.first_token == reference.first_token,
                    "layers": layers_of(capture, geometry, reference),
                }
            )
    return {
        "engine": engine,
        "engine_version": ready.engine_version,
        "compute_dtype": ready.effective.compute_dtype,
        "page_dtype": contract.dtype,
        "prompts": found,
    }


def worst(prompts: Sequence[dict[str, Any]]) -> list[dict[str, dict[str, float]]]:
    """Per layer, over all prompts: the largest errors and the smallest share."""
    choose = {"absolute": max, "relative": max, "same": min}
    return [
        {
            half: {name: pick(each[half][name] for each in layers) for name, pick in choose.items()}
            for half in ("k", "v")
        }
        for layers in zip(*(prompt["layers"] for prompt in prompts), strict=True)
    ]


def table(result: dict[str, Any]) -> Iterator[str]:
    equal = sum(prompt["first_token_equal"] for prompt in result["prompts"])
    yield (
        f"\n{result['model']}, {result['engine']} {result['engine_version']}: computed in "
        f"{result['compute_dtype']}, pages of {result['page_dtype']}; "
        f"first token equal {equal} of {len(result['prompts'])} times"
    )
    columns = [f"{half} {name}" for half in "KV" for name in ("absolute", "relative", "same")]
    yield f"{'layer':>5}" + "".join(f"{column:>12}" for column in columns)
    for layer, halves in enumerate(result["worst"]):
        cells = [
            f"{each['absolute']:12.6f}{each['relative']:12.6f}{each['same']:12.2%}"
            for each in (halves["k"], halves["v"])
        ]
        yield f"{layer:5}" + "".join(cells)


def reported(
    results: Sequence[dict[str, Any]], lengths: Sequence[int], reference: dict[str, str]
) -> dict[str, Any]:
    largest = max(
        each[half]["relative"] for one in results for each in one["worst"] for half in "kv"
    )
    return {
        "method": __doc__,
        "prompt_tokens": lengths,
        "bound_relative": BOUND_RELATIVE,
        "largest_relative": largest,
        "met": largest <= BOUND_RELATIVE,
        "machine": machine("mlx", "mlx-lm", "numpy"),
        "reference": reference,
        "results": results,
    }


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    here = [name for name, each in SOURCES.items() if each.python.exists()]
    parser.add_argument("--engine", choices=sorted(SOURCES), action="append")
    parser.add_argument("--tokens", type=int, action="append", help="a prompt's length")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument(
        "--transformers-python",
        type=Path,
        default=vllm_replicas.PYTHON,
        help="has torch and transformers",
    )
    options = parser.parse_args()
    options.engine = options.engine or here
    options.tokens = options.tokens or list(PROMPT_TOKENS)
    return options


def main() -> int:
    options = asked()
    results, versions = [], {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name, model_dir in models(options.model, scratch).items():
            prompts = prompts_of(model_dir, options.tokens)
            expected, versions = references(
                options.transformers_python, model_dir, prompts, scratch
            )
            for engine in options.engine:
                found = measured(engine, model_dir, prompts, expected)
                results.append({"model": name, **found, "worst": worst(found["prompts"])})
                print("\n".join(table(results[-1])), flush=True)
    report = reported(results, options.tokens, versions)
    path = write(options.output, "fidelity", report)
    verdict = "met" if report["met"] else "missed"
    print(
        f"\nlargest relative {report['largest_relative']:.6f}, "
        f"bound {BOUND_RELATIVE:.6f}: {verdict}; {path}"
    )
    return 0 if report["met"] else 1


if __name__ == "__main__":
    sys.exit(main())

"""A checkpoint's fingerprint, its contract, and why two contracts differ (DESIGN §5).

`weights` covers every tensor's name, dtype, shape and bytes, and the few values of config.json
that the forward pass computes with besides `attention` and `positions` (`rms_norm_eps`, …), by
meaning. It does not depend on sharding or on the order in files. Left out, because no engine
uses them: `lm_head.weight` of a checkpoint that ties its embeddings (some copies store it,
others don't), and the `inv_freq` buffers of old Llama checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdctl.errors import UsageError
from pdctl.topology import tokenizer
from pdctl.topology.checkpoint import Checkpoint
from pdctl.topology.contract import Contract
from pdctl.topology.diagnostics import Diagnostic, Severity
from pdctl.topology.digests import Digest, DigestCache, Progress, hash_files
from pdctl.topology.model import Dtype
from pdctl.topology.weights import WeightsError, weight_files

FLOAT_DTYPES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}


class FingerprintError(UsageError):
    """A checkpoint whose files are missing, truncated or garbled; the message names the file."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """The three content fields of a contract, with the parts that they were made from."""

    weights: str
    tokenizer: str
    chat_template: str
    tensors: dict[str, str]
    """Tensor (or `config.json:KEY`) → digest."""
    files: dict[str, str]
    """Tokenizer file → digest."""
    template_file: str
    total_bytes: int
    """Bytes of all tensors."""
    stored_dtype: str = "mixed"
    """The dtype that all counted tensors have on the disk; "mixed" where they don't agree."""
    read_bytes: int = 0
    """Bytes that were hashed this time; 0 when all digests were remembered."""


def fingerprint(
    model_dir: Path,
    checkpoint: Checkpoint,
    *,
    cache: DigestCache | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
) -> Fingerprint:
    """Fingerprints a local checkpoint; reads all weights unless they are remembered.

    Raises:
        FingerprintError: a file is missing, truncated or garbled, or the weights are quantised.
    """
    try:
        files = tokenizer.tokenizer_digests(model_dir)
        templates, template_file = tokenizer.chat_templates(model_dir)
        hashed = hash_files(
            weight_files(model_dir), cache=cache, progress=progress, workers=workers
        )
    except (WeightsError, ValueError) as error:
        raise FingerprintError(str(error), hint="copy the checkpoint again") from None
    if not files:
        raise FingerprintError(f"{model_dir} has no tokenizer files", hint="tokenizer.json is one")
    tensors = _tensors(hashed.digests, checkpoint, model_dir)
    return Fingerprint(
        weights=tokenizer.combine(tensors),
        tokenizer=tokenizer.combine(files),
        chat_template=tokenizer.template_digest(templates),
        tensors=tensors,
        files=files,
        template_file=template_file,
        total_bytes=hashed.total_bytes,
        stored_dtype=_stored_dtype(hashed.digests),
        read_bytes=hashed.read_bytes,
    )


def make_contract(
    checkpoint: Checkpoint, content: Fingerprint, *, dtype: Dtype, context_length: int
) -> Contract:
    """What a replica that serves this checkpoint so must have in common with its peers."""
    return Contract(
        weights=content.weights,
        tokenizer=content.tokenizer,
        chat_template=content.chat_template,
        attention=checkpoint.attention,
        positions=checkpoint.positions(context_length),
        dtype=dtype,
    )


def check_dtype(content: Fingerprint, dtype: Dtype) -> list[Diagnostic]:
    """Warns where serving casts the checkpoint (R33)."""
    stored = content.stored_dtype
    if stored == dtype:
        return []
    return [
        Diagnostic(
            severity=Severity.WARNING,
            code="topology.cast",
            summary=f"model: the checkpoint is {stored} and is served as {dtype}",
            field="model.dtype",
            hint=f'write dtype = "{stored}"' if stored in set(Dtype) else None,
        )
    ]


def _stored_dtype(digests: tuple[Digest, ...]) -> str:
    kinds = {d.dtype for d in digests if not d.name.endswith("rotary_emb.inv_freq")}
    return FLOAT_DTYPES.get(kinds.pop(), "mixed") if len(kinds) == 1 else "mixed"


def _tensors(
    digests: tuple[Digest, ...], checkpoint: Checkpoint, model_dir: Path
) -> dict[str, str]:
    tied = checkpoint.arithmetic["tie_word_embeddings"] == "True"
    found = {f"config.json:{key}": value for key, value in checkpoint.arithmetic.items()}
    for digest in digests:
        unused = digest.name.endswith("rotary_emb.inv_freq") or (
            tied and digest.name == "lm_head.weight"
        )
        if unused:
            continue
        if digest.dtype not in FLOAT_DTYPES:
            raise FingerprintError(
                f"{model_dir}: tensor {digest.name} is {digest.dtype}, which is not served",
                hint="use unquantised FP16 or BF16 weights",
            )
        found[digest.name] = digest.value
    return found

"""The contract: what must be equal, or two replicas may not exchange KV cache (DESIGN §5)."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from pdctl.topology.model import PAGE_TOKENS, Dtype

PROTOCOL = 1
"""Version of pages and wire messages; raised whenever either changes meaning."""

DOMAIN = b"pdctl.contract.v1\n"


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """The KV cache's shape, from the meaning of config.json."""

    kind: str
    """"full" is the only one that is served today."""
    layers: int
    kv_heads: int
    head_dim: int


class Positions(msgspec.Struct, frozen=True, kw_only=True):
    """What RoPE is computed with. `scaling` is canonical: sorted keys, None for default RoPE."""

    rope_theta: float
    scaling: dict[str, Any] | None = None
    max_positions: int
    context_length: int


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """The eight fields. Two replicas may exchange KV when all are equal."""

    weights: str
    tokenizer: str
    chat_template: str
    attention: Attention
    positions: Positions
    dtype: Dtype
    page_tokens: int = PAGE_TOKENS
    protocol: int = PROTOCOL

    @property
    def digest(self) -> str:
        """SHA-256 (hex) over a domain tag and sorted compact JSON."""
        body = msgspec.json.encode(self, order="sorted")
        return hashlib.sha256(DOMAIN + body).hexdigest()

    @property
    def token_kv_bytes(self) -> int:
        """Bytes of K and V per token, over all layers, in the contract's dtype (16 bits)."""
        a = self.attention
        return a.layers * 2 * a.kv_heads * a.head_dim * 2

    @property
    def page_bytes(self) -> int:
        return self.token_kv_bytes * self.page_tokens


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One field in which two contracts differ; values as they read in a message."""

    field: str
    left: str
    right: str


def compare(left: Contract, right: Contract) -> tuple[Difference, ...]:
    """Every field that differs, in the contract's order; empty when they match."""
    found = []
    for name in Contract.__struct_fields__:
        a, b = getattr(left, name), getattr(right, name)
        if a != b:
            found.append(Difference(field=name, left=_text(a), right=_text(b)))
    return tuple(found)


def _text(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        return msgspec.json.encode(value, order="sorted").decode()
    return str(value)

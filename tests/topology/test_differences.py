"""Mismatches in words: field, part, both values, both replicas, and what to copy."""

from __future__ import annotations

import msgspec

from pdctl.topology.contract import Attention, Contract, Positions
from pdctl.topology.differences import Side, compared_pairs, explain, explain_all
from pdctl.topology.fingerprint import Fingerprint
from pdctl.topology.model import Dtype, Role

CONTENT = Fingerprint(
    weights="a" * 64,
    tokenizer="b" * 64,
    chat_template="c" * 64,
    tensors={"model.norm.weight": "1", "lm_head.weight": "2", "config.json:rms_norm_eps": "3"},
    files={"tokenizer.json": "1"},
    template_file="chat_template.jinja",
    total_bytes=1,
    stored_dtype="float16",
)


def side(name: str, role: Role, host: str = "local", **content: object) -> Side:
    found = msgspec.structs.replace(CONTENT, **content)
    contract = Contract(
        weights=found.weights,
        tokenizer=found.tokenizer,
        chat_template=found.chat_template,
        attention=Attention(kind="full", layers=4, kv_heads=2, head_dim=64),
        positions=Positions(rope_theta=1e5, max_positions=8192, context_length=2048),
        dtype=Dtype.FLOAT16,
    )
    return Side(
        replica=name,
        role=role,
        host=host,
        model_dir=f"/models/{name}",
        contract=contract,
        content=found,
    )


P0 = side("p0", Role.PREFILL)


def test_equal_sides_need_no_explanation() -> None:
    assert explain(P0, side("d0", Role.DECODE)) == []


def test_weights_name_the_tensor() -> None:
    """The summary names replica, field, peer and tensor; the detail both values, shortened."""
    other = side(
        "d0", Role.DECODE, weights="d" * 64, tensors={**CONTENT.tensors, "model.norm.weight": "9"}
    )
    (found,) = explain(P0, other)
    assert found.code == "contract.weights"
    assert found.summary == (
        'replica "d0": weights differ from prefill replica "p0" (tensor model.norm.weight)'
    )
    assert found.detail == '"p0": aaaaaaaaaaaa…, "d0": dddddddddddd…'
    assert found.hint == "copy the weights from /models/p0 to /models/d0"


def test_a_config_value_is_named_as_such() -> None:
    other = side(
        "d0",
        Role.DECODE,
        weights="d" * 64,
        tensors={**CONTENT.tensors, "config.json:rms_norm_eps": "9"},
    )
    (found,) = explain(P0, other)
    assert "(value config.json:rms_norm_eps)" in found.summary
    assert found.hint == "copy config.json from /models/p0/config.json to /models/d0/config.json"


def test_many_tensors_are_counted() -> None:
    tensors = {f"t{i}": "1" for i in range(9)}
    left = side("p0", Role.PREFILL, tensors=tensors)
    right = side("d0", Role.DECODE, tensors=dict.fromkeys(tensors, "2"), weights="e" * 64)
    assert "(tensors t0, t1, t2 and 6 more)" in explain(left, right)[0].summary


def test_tokenizer_names_the_file_and_the_hosts() -> None:
    """The sentence of DESIGN §2, and a hint with both hosts."""
    left = side("p0", Role.PREFILL, host="gpu1")
    right = side("d0", Role.DECODE, host="studio", tokenizer="e" * 64,
                 files={"tokenizer.json": "2"})  # fmt: skip
    (found,) = explain(left, right)
    assert found.summary == (
        'replica "d0": tokenizer differs from prefill replica "p0" (tokenizer.json)'
    )
    assert found.hint == (
        "copy tokenizer.json from gpu1:/models/p0/tokenizer.json "
        "to studio:/models/d0/tokenizer.json"
    )
    extra = side("d0", Role.DECODE, tokenizer="e" * 64, files={**CONTENT.files, "merges.txt": "1"})
    assert explain(P0, extra)[0].hint == "remove merges.txt from /models/d0"


def test_positions_name_the_value() -> None:
    right = side("d0", Role.DECODE)
    positions = msgspec.structs.replace(right.contract.positions, rope_theta=1e4)
    contract = msgspec.structs.replace(right.contract, positions=positions)
    (found,) = explain(P0, msgspec.structs.replace(right, contract=contract))
    assert found.code == "contract.positions"
    assert "(rope_theta: 100000.0 and 10000.0)" in found.summary


def test_another_stored_dtype_is_named() -> None:
    """A BF16 copy of an FP16 checkpoint differs in its weights, and `dtype` says why."""
    right = side("d0", Role.DECODE, weights="d" * 64, tensors={}, stored_dtype="bfloat16")
    assert [d.code for d in explain(P0, right)] == ["contract.weights", "contract.dtype"]


def test_every_pair_and_every_ordinary_replica_is_compared() -> None:
    """Prefill with decode; an ordinary replica with the first: all answer for one model."""
    sides = [side("p0", Role.PREFILL), side("p1", Role.PREFILL), side("d0", Role.DECODE),
             side("o0", Role.BOTH)]  # fmt: skip
    compared = [(a.replica, b.replica) for a, b in compared_pairs(sides)]
    assert compared == [("p0", "d0"), ("p1", "d0"), ("p0", "o0")]
    ordinary_only = [side("o0", Role.BOTH), side("o1", Role.BOTH, chat_template="none")]
    (found,) = explain_all(ordinary_only)
    assert found.code == "contract.chat_template"
    assert 'ordinary replica "o0"' in found.summary

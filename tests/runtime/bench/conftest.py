from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pdctl.runtime.bench.machine import Disturbance
from pdctl.runtime.bench.prompts import PromptSource

SYLLABLES = ("ba", "ke", "lo", "mi", "nu", "ra", "so", "ti", "vu", "ze")
WORDS = [a + b for a in SYLLABLES for b in SYLLABLES]


def byte_tokenizer(*, begin: bool) -> Tokenizer:
    """Byte-level BPE, trained on the spot; `begin` puts a special token before every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([" ".join(WORDS)] * 50, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


@pytest.fixture(autouse=True)
def _undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is run again where a test says so, whatever the hypervisor gives to others."""
    monkeypatch.setattr(Disturbance, "steal", lambda disturbance: 0.0)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_tokenizer(begin=True)


@pytest.fixture
def prompts(tokenizer: Tokenizer) -> PromptSource:
    return PromptSource(tokenizer, seed=0)

"""Where pdctl takes part in SGLang, against the SGLang that is installed. Run by an environment
that has it."""

from __future__ import annotations

import pkgutil
import warnings

import pytest

with warnings.catch_warnings():
    # of SGLang's own imports
    warnings.simplefilter("ignore")
    pytest.importorskip("sglang")
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES
    from sglang.srt.disaggregation.base.conn import BaseKVManager, BaseKVReceiver, BaseKVSender
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    from pdctl.engines.sglang.hooks import HOOKS, add_backend, class_of
    from pdctl.engines.sglang.options import OWNED, SWITCHES, VALUES


@pytest.mark.parametrize("target", [hook.target for hook in HOOKS])
def test_every_function_that_is_hooked_is_there(target: str) -> None:
    """SGLang would log that it is not, and serve on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert callable(pkgutil.resolve_name(target))


def test_the_backend_is_a_choice_and_a_member_once() -> None:
    add_backend()
    add_backend()
    assert TransferBackend("pdctl").name == "PDCTL"
    assert len([one for one in TransferBackend if one.value == "pdctl"]) == 1
    assert "pdctl" in DISAGG_TRANSFER_BACKEND_CHOICES


def test_the_backends_classes_are_what_sglang_asks_for() -> None:
    """Other backends stay SGLang's own."""
    add_backend()
    own = TransferBackend("pdctl")
    kinds = {
        KVClassType.MANAGER: BaseKVManager,
        KVClassType.SENDER: BaseKVSender,
        KVClassType.RECEIVER: BaseKVReceiver,
    }
    for kind, base in kinds.items():
        made = class_of(get_kv_class, own, kind)
        assert issubclass(made, base)
        assert not made.__abstractmethods__
    fake = class_of(get_kv_class, TransferBackend.FAKE, KVClassType.SENDER)
    assert fake.__module__.startswith("sglang.")


def test_every_option_that_is_named_is_one_of_its_server() -> None:
    """R51: none is passed on that its parser would end at."""
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    names = {
        option[2:].replace("-", "_")
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    assert names >= SWITCHES | VALUES
    assert names >= {"page_size", "disaggregation_transfer_backend", "model_path"} & set(OWNED)

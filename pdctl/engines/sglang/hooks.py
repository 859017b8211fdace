"""Where pdctl takes part in SGLang (0.5.21 to 0.5.23): a transfer backend, and some functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
from sglang.srt.disaggregation import utils
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from pdctl.engines.sglang import arrivals, joining, naming, queueing, stepping
from pdctl.engines.sglang.spec import BACKEND, NATIVE

MEMBER = BACKEND.upper()


class NoBootstrapServer:
    """SGLang's prefill server opens a registry for its decode servers; here nobody asks one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        return


def add_backend() -> None:
    """A member of SGLang's enumeration of backends, and a choice of its command line."""
    add_disagg_transfer_backend_choices([BACKEND])
    backends = utils.TransferBackend
    if BACKEND in backends._value2member_map_:
        return
    member = object.__new__(backends)
    member._name_, member._value_ = MEMBER, BACKEND
    backends._member_names_.append(MEMBER)
    backends._member_map_[MEMBER] = member
    backends._value2member_map_[BACKEND] = member
    type.__setattr__(backends, MEMBER, member)


def class_of(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """SGLang's factory of a backend's classes."""
    kinds = utils.KVClassType
    if class_type is kinds.KVARGS or transfer_backend.value not in (BACKEND, NATIVE):
        return original(transfer_backend, class_type)
    if transfer_backend.value == NATIVE:
        from pdctl.engines.sglang import native

        return {
            kinds.MANAGER: native.NativeManager,
            kinds.SENDER: native.NativeSender,
            kinds.RECEIVER: native.NativeReceiver,
            kinds.BOOTSTRAP_SERVER: native.NativeServer,
        }[class_type]
    from pdctl.engines.sglang.exchange import Exchange
    from pdctl.engines.sglang.receiving import DecodeLeg
    from pdctl.engines.sglang.sending import PrefillLeg

    return {
        kinds.MANAGER: Exchange,
        kinds.SENDER: PrefillLeg,
        kinds.RECEIVER: DecodeLeg,
        kinds.BOOTSTRAP_SERVER: NoBootstrapServer,
    }[class_type]


class Hook(msgspec.Struct, frozen=True):
    target: str
    """Dotted path of a function of SGLang's."""
    function: Callable[..., Any]
    kind: HookType = HookType.AROUND


_SRT = "sglang.srt"

HOOKS = (
    Hook(f"{_SRT}.disaggregation.utils.get_kv_class", class_of),
    Hook(f"{_SRT}.disaggregation.prefill.PrefillBootstrapQueue.add", arrivals.to_prefill),
    Hook(f"{_SRT}.disaggregation.decode.DecodePreallocQueue.add", arrivals.to_decode),
    Hook(
        f"{_SRT}.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        arrivals.computed,
        HookType.BEFORE,
    ),
    Hook(f"{_SRT}.managers.scheduler.Scheduler.init_disaggregation", joining.join, HookType.AFTER),
    Hook(f"{_SRT}.managers.scheduler.Scheduler.run_batch", stepping.ran),
    Hook(f"{_SRT}.layers.attention.base_attn_backend.AttentionBackend.forward", stepping.attended),
    Hook(f"{_SRT}.managers.scheduler.Scheduler.get_new_batch_prefill", queueing.chosen),
    Hook(f"{_SRT}.managers.scheduler.Scheduler.is_fully_idle", queueing.idle),
    Hook(
        f"{_SRT}.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
        ".process_batch_result_prefill",
        queueing.computed,
    ),
    Hook(
        f"{_SRT}.disaggregation.prefill.SchedulerDisaggregationPrefillMixin"
        ".process_batch_result_disagg_prefill",
        queueing.computed,
    ),
    Hook(
        f"{_SRT}.entrypoints.openai.serving_completions.OpenAIServingCompletion"
        "._convert_to_internal_request",
        naming.without_texts,
        HookType.AFTER,
    ),
    Hook(f"{_SRT}.entrypoints.openai.utils.to_openai_style_logprobs", naming.named_by_id),
)


def add_hooks() -> None:
    """Applied by SGLang after all its plug-ins were called; `joining.join` looks whether they
    were."""
    for hook in HOOKS:
        HookRegistry.register(hook.target, hook.function, hook.kind)

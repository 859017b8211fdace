"""What a request costs on each path, and which path it should take. Pure: no I/O, no clock.

    curve      seconds by prompt length: a small family, fitted robustly
    record     what was measured, as it is stored with the cluster's state
    lengths    prompt tokens from the bytes of a body
    book       a curve per path, kept current by what requests really took
    queues     prompts that each replica has still to compute
    deciding   P/D or alone, with hysteresis and bounded exploration
    forecast   what `pdctl plan` predicts, in figures and in words

Who times requests, reads the clock and writes the file is `pdctl.runtime.router`.
"""

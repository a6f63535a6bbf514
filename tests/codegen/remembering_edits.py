"""Edits of a script in bf16 whose model remembers much: each brings back a fault of scripts."""

from __future__ import annotations

from tests.codegen.edits import Edit

_LOAD = "    load_weights([model], recipe, options.weights, mesh)\n"
_BUILD = "    optimizer = build_optimizer([model]"
_AGAIN = 'recompute(layer, "selective")'
_EACH = "    for name, one in model.named_{}():\n        one.data = {}\n"
FAULTS = (
    Edit(
        "buffers that the constructor fills later are memory without numbers",
        _LOAD,
        _LOAD + _EACH.format("buffers", 'one * 2e-38 if name == "inv_freq" else one'),
    ),
    Edit(
        "what hangs on a parameter is lost",
        _LOAD,
        _LOAD + "    for one in model.parameters():\n        one.__dict__.clear()\n",
    ),
    Edit(
        "a weight is replayed otherwise than the constructor makes it",
        _LOAD,
        _LOAD + _EACH.format("parameters", 'one.roll(1) if name == "head.bias" else one'),
    ),
    Edit(
        "a seed of the constructor's own is ignored",
        _LOAD,
        _LOAD + _EACH.format("buffers", 'one.roll(1) if name.endswith("kept") else one'),
    ),
    Edit(
        "masters begin with rounded weights",
        _LOAD,
        _LOAD + _EACH.format("parameters", "one.data.to(options.dtype).to(one.dtype)"),
    ),
    Edit(
        "buffers are rounded",
        "compute_dtype=dtype",
        'compute_dtype=dtype, half_buffers=("inv_freq", "h.*.mean", "h.*.steps")',
    ),
    Edit(
        "weights are stepped in 16 bits, without masters",
        _BUILD,
        "    model.gradient_buckets.attach()\n    model.gradient_buckets.narrow()\n" + _BUILD,
    ),
)
HARMLESS = (Edit("layers that run again whole", _AGAIN, 'recompute(layer, "full")'),)

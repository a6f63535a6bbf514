"""Types of costs: a layer's cost, the arrangement of a training, the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Self

from autopar.planner.costs.collectives.conversions import NO_STATISTICS, Statistics
from autopar.planner.costs.ops.kept import is_product
from autopar.planner.costs.ops.measurements import Provenance
from autopar.planner.costs.schedules.table import ScheduleKind
from autopar.planner.files import (
    Bytes,
    Degree,
    Elements,
    Flops,
    Number,
    Rate,
    Repeats,
    Rows,
    Seconds,
    SomeBytes,
    SomeSeconds,
)
from autopar.planner.graph.ops import Op
from autopar.planner.layers import Compile
from autopar.planner.precision import (
    Compression,
    Float8,
    Kernels,
    Outer,
    Precision,
    RowEnum,
)


class Recompute(RowEnum):
    """How a layer saves memory until its backward."""

    runs_again: bool
    # of a layer that runs again: the ops whose results it saves besides its inputs; None: no op
    saved_ops: Callable[[Op, Kernels], bool] | None
    compiles: bool  # torch.compile takes layers in this mode
    tables: tuple[str, ...]  # lists in the script with the paths of layers in this mode
    makes_chunks: bool  # the loss computes the layer's logits, chunk by chunk
    is_on_host: bool  # what it keeps lies in the host's memory until the backward

    NONE = "none", False, None, True, (), False, False
    # not compiled: inside compiled code, inductor decides by itself which products run again
    SELECTIVE = "selective", True, is_product, False, ("RECOMPUTED_IN_PART",), False, False
    FULL = "full", True, None, True, ("RECOMPUTED",), False, False
    CHUNKED = "chunked", False, None, True, ("CHUNKED",), True, False
    HOST = "host", False, None, True, ("ON_HOST",), False, True
    FULL_HOST = "full-host", True, None, True, ("RECOMPUTED", "ON_HOST"), False, True

    @property
    def wraps_layers(self) -> bool:
        """Whether the script wraps layers in this mode, so that their module calls must remain."""
        return bool(self.tables)

    @property
    def on_device(self) -> Recompute:
        """The mode that keeps on the device what this one sends to the host."""
        alike = (one for one in Recompute if one.runs_again == self.runs_again)
        return next(one for one in alike if one.saved_ops is None) if self.is_on_host else self

    @property
    def spares_device(self) -> bool:
        """Whether a layer keeps fewer tensors on the device until its backward."""
        return self.runs_again or self.is_on_host

    def saves(self, op: Op, kernels: Kernels) -> bool:
        """Whether a layer that runs again saves the results of an op."""
        return self.saved_ops is not None and self.saved_ops(op, kernels)


class Offload(RowEnum):
    """What lies in the host's memory instead of the device's."""

    has_states: bool  # gradients and optimizer states; then the optimizer runs on the CPU
    has_outer: bool  # the state of local steps' outer optimizer, which then runs on the CPU
    words: str
    meaning: str  # for comments in scripts

    NONE = "none", False, False, "", ""
    OPTIMIZER = (
        *("optimizer", True, False, "optimizer on the host"),
        "gradients and optimizer states lie on the host; its CPU takes the step",
    )
    OUTER = "outer", False, True, "outer optimizer on the host", ""


class Zero(IntEnum):
    """A ZeRO level: what is divided between the ranks of the shard axis."""

    _value_: int
    divides_optimizer: bool
    divides_gradients: bool  # a rank keeps only its part of a reduced gradient
    divides_parameters: bool  # each pass gathers them
    # by torch's fully_shard: it has no buckets, and reduces gradients in every backward of a step
    shards_modules: bool
    words: str

    NONE = (
        *(0, False, False, False, False),
        "each data rank has all parameters, gradients and optimizer states",
    )
    OPTIMIZER = (
        *(1, True, False, False, False),
        "each data rank has a part of the optimizer states",
    )
    GRADIENTS = (
        *(2, True, True, False, True),
        "each data rank has a part of the gradients and optimizer states",
    )
    PARAMETERS = (
        *(3, True, True, True, True),
        "each data rank has a part of the parameters, gradients and optimizer states",
    )

    def __new__(cls, level: int, *row: Any) -> Self:
        """Return a level with the columns of its row."""
        one = int.__new__(cls, level)
        one._value_ = level
        one.divides_optimizer, one.divides_gradients, one.divides_parameters = row[:3]
        one.shards_modules, one.words = row[3:]
        return one

    @property
    def gathers_updated(self) -> bool:
        """Whether parameters are gathered once a step, after the optimizer changed them."""
        return self.divides_optimizer and not self.shards_modules

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered from the first forward of a step to its end."""
        return self.shards_modules and not self.divides_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """How ranks share the training; they are numbered tensor first, then data, then pipeline.

    `shard` ranks together hold one sharded copy: all of `data`, or fewer (HSDP). With local steps,
    `shard` ranks are one replica, also without sharding. If the microbatch sizes of data ranks
    differ, `rows` has each rank's, and `microbatch` is the largest.
    """

    pipeline: Degree
    data: Degree
    tensor: Degree
    shard: Degree
    microbatch: Rows  # rows of one microbatch on one data rank
    microbatches: Repeats  # of one data rank in one step
    schedule: ScheduleKind
    stages_per_rank: Degree
    zero: Zero
    bucket_bytes: SomeBytes
    compression: Compression  # of the gradients that data ranks send
    precision: Precision
    compile: Compile = Compile.NONE
    float8: Float8 = Float8.NONE  # of the linear layers inside compiled layers
    offload: Offload = Offload.NONE
    rows: tuple[Rows, ...] = ()
    sync_every: Repeats = 1  # local steps of each replica between two outer steps; 1: no local ones
    outer: Outer = Outer.NONE  # of local steps
    outer_parts: Repeats = 1  # parts of the model, which take outer steps in turn
    order: Number = 0  # which of the tried orders of unlike nodes; 0 in a plan

    @property
    def ranks(self) -> int:
        """The processes of the training."""
        return self.pipeline * self.data * self.tensor

    @property
    def is_local(self) -> bool:
        """Whether replicas take local steps."""
        return self.sync_every > 1

    @property
    def averaging_ranks(self) -> Degree:
        """The number of data ranks that average their gradients in every step."""
        return self.shard if self.is_local else self.data

    @property
    def is_one_pass(self) -> bool:
        """Whether a step is a single forward and backward."""
        return self.pipeline == self.microbatches == 1

    @property
    def divided(self) -> Zero:
        """The level that has an effect: ZeRO-0 if one rank has all parts, and none on the host."""
        return self.zero if self.shard > 1 or self.shards_on_host else Zero.NONE

    @property
    def reduces_each(self) -> bool:
        """Whether every backward of a step sends gradients: the device has no room for sums."""
        return self.zero.shards_modules or self.offload.has_states

    @property
    def shards_on_host(self) -> bool:
        """Whether fully_shard keeps its parts of the parameters in the host's memory, too.

        On a single device these are whole layers, which are fetched one after another.
        """
        return self.offload.has_states and self.zero.shards_modules

    @property
    def optimizer_ranks(self) -> int:
        """The number of data ranks that divide the optimizer's states between them."""
        return self.shard if self.zero.divides_optimizer else 1

    @property
    def has_buckets(self) -> bool:
        """Whether gradients lie in buckets; if they go to the host, even on a single data rank."""
        is_sent = self.averaging_ranks > 1 or self.offload.has_states
        return is_sent and not self.zero.shards_modules

    @property
    def keeps_buckets(self) -> bool:
        """Whether the memory of buckets stays from step to step."""
        return self.has_buckets and not self.offload.has_states

    @property
    def global_batch(self) -> int:
        """Rows of one optimizer step on all ranks together."""
        return self.block * self.microbatches

    @property
    def block(self) -> int:
        """Rows of one microbatch of all data ranks together."""
        return sum(self.rows) or self.microbatch * self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The bytes of parameters, gradients and optimizer states, before ZeRO divides them."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    trainable: int  # elements with a gradient, of 4 bytes; published runs have narrower ones, too


@dataclass(frozen=True, slots=True, kw_only=True)
class RankParameters(State):
    """The parameters on one rank: those of a layer, or of all layers of a stage."""

    trainable_tensors: int = 0
    replicated_gradient_bytes: int = 0  # of R parameters: all-reduced over the tensor axis
    whole_gradient_bytes: int = 0  # of R parameters and tied weights: int8 and PowerSGD send fp32
    thin_gradient_bytes: int = 0  # of the other gradients, as PowerSGD sends them
    # rows and elements of each weight that can be gathered in float8 instead of 16 bits
    float8_weights: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost(RankParameters):
    """The cost of one microbatch on one rank, for a layer or for all layers of a stage.

    Seconds include collectives on the tensor axis, which are not overlapped. The backward includes
    recomputation.
    """

    forward_seconds: float
    backward_seconds: float
    weight_gradient_seconds: float  # the part of the backward that a zero-bubble schedule defers
    communication_seconds: float  # part of forward and backward: collectives on the tensor axis
    recompute_seconds: float  # part of the backward: what the mode adds in order to save memory
    measured_seconds: float  # the measured part of forward and backward; the rest is by formula
    saved_bytes: int  # kept from the forward to the backward of a microbatch
    output_bytes: int  # sent to the next stage if a stage ends here; one direction
    deferred_bytes: int = 0  # held by a split backward from its first half to its second
    host_saved_bytes: int = 0  # in the host's memory from the forward to the backward
    host_wait_seconds: float = 0.0  # part of recompute_seconds: exposed copies of these bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost(RankCost):
    """The cost of a layer, in one layout and recompute mode."""

    parameters: int  # elements on this rank
    transient_bytes: int  # peak while the layer runs, in addition to saved_bytes
    # How far memory is above saved_bytes, without the weight's gradient, in the backward of the op
    # with weights that needs most memory; negative if later ops have freed more.
    learning_bytes: int = 0
    learned_gradient_bytes: int = 0  # fp32 bytes of the gradient of that op's weight
    early_gradient_bytes: int = 0  # of saved_bytes: gradients that a loss in chunks makes early
    # gradients of weights shared with other layers: later layers made them, earlier ones add theirs
    waiting_gradient_bytes: int = 0
    statistics: Statistics = NO_STATISTICS  # of batch norms synchronised over data ranks


Modes = Mapping[Recompute, LayerCost]  # the cost of a layer in each mode


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationTerm:
    """A kind of communication of the busiest rank in one step, and its reason."""

    reason: str  # "gradients summed over the data axis", …
    collective: str
    ranks: Degree
    count: Elements
    payload_bytes: Bytes  # in total
    seconds: Seconds
    exposed_seconds: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTerm:
    """A term of the step's time; the terms add up to the step."""

    name: str
    seconds: Seconds
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPrediction:
    """The peak memory of a rank, by category.

    `allocated_bytes` counts tensors, `reserved_bytes` also the allocator's fragments, and
    `device_bytes` also the device context.
    """

    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    activation_bytes: Bytes  # saved, of all microbatches in flight
    transient_bytes: Bytes  # of the layer at the peak, logits included
    unsharded_bytes: Bytes  # gathered parameters, and gradients before they are reduced
    communication_bytes: Bytes  # buckets and buffers
    margin_bytes: Bytes  # allocator fragments
    context_bytes: Bytes  # device context and communication libraries
    host_bytes: Bytes = 0  # in the host's memory

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all tensors."""
        return (
            self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes
            + self.activation_bytes + self.transient_bytes + self.unsharded_bytes
            + self.communication_bytes
        )  # fmt: skip

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all tensors and of the allocator's fragments."""
        return self.allocated_bytes + self.margin_bytes

    @property
    def device_bytes(self) -> int:
        """Everything in the device's memory."""
        return self.reserved_bytes + self.context_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """A stage: the seconds of one microbatch, and the idle time and memory of its rank."""

    forward_seconds: Seconds
    backward_seconds: Seconds
    idle_seconds: Seconds  # of its rank in a step
    in_flight: Elements
    memory: MemoryPrediction  # of its rank, all its stages together
    tensor_seconds: Seconds = 0.0  # messages of the tensor axis in forward and backward
    # as the schedule runs the stage: a forward, a backward, and the two halves of a split backward
    action_seconds: tuple[Seconds, Seconds, Seconds, Seconds] | None = None  # None in older plans
    transfer_seconds: Seconds = 0.0  # of one microbatch to the next stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time and memory of a step."""

    step_seconds: SomeSeconds
    terms: tuple[TimeTerm, ...]
    communication: tuple[CommunicationTerm, ...]
    stages: tuple[StagePrediction, ...]
    model_flops: Flops  # of a step, all ranks, without recomputation
    peak_flops_per_second: Rate  # of all devices together
    outer_delay: Number = 0  # the number of local steps during which a part of the model is sent

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return self.model_flops / (self.step_seconds * self.peak_flops_per_second)

    @property
    def peak_memory(self) -> MemoryPrediction:
        """Memory of the fullest rank."""
        return max((stage.memory for stage in self.stages), key=lambda m: m.device_bytes)

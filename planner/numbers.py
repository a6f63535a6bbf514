"""Names the kinds of numbers that plans hold, each with its bounds; readers check them."""

from typing import Annotated

from annotated_types import Ge, Gt, Le

# The largest machines have about 100,000; ten million is a slip of the finger.
MOST_DEVICES = 262_144
_MOST = 2**60  # bytes, elements, FLOPs: more than any machine has

Degree = Annotated[int, Ge(1), Le(MOST_DEVICES)]  # of ranks, devices, nodes
Number = Annotated[int, Ge(0), Le(MOST_DEVICES)]  # of what may be absent
Rows = Annotated[int, Ge(1), Le(2**31)]
Repeats = Annotated[int, Ge(1), Le(2**20)]  # what a script does one after another
Bytes = Annotated[int, Ge(0), Le(_MOST)]
SomeBytes = Annotated[int, Ge(1), Le(_MOST)]
Elements = Annotated[int, Ge(0), Le(_MOST)]
Flops = Annotated[int, Ge(0), Le(10**30)]
Seconds = Annotated[float, Ge(0), Le(1e12)]
SomeSeconds = Annotated[float, Gt(0), Le(1e12)]
Rate = Annotated[float, Gt(0), Le(1e30)]  # of bytes or FLOPs per second
Share = Annotated[float, Ge(0), Le(1)]
Figure = Annotated[float, Ge(0), Le(1e12)]  # of money, or a ratio that may be above 1

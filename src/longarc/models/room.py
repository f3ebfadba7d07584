"""Whether a model fits into memory, said before any of it is allocated: its sizes may come from a damaged file."""

import resource
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from longarc.errors import ConfigError, ResourceError
from longarc.runs.disk import size_text

_NO_SIZES: Final = frozenset(
    {
        *("max_position_embeddings", "index_topk", "index_topk_freq", "index_skip_topk_offset"),
        *("num_experts_per_tok", "first_k_dense_replace", "mtp_num_depths"),
        *("bos_token_id", "eos_token_id", "pad_token_id"),
    }
)
"""Whole numbers of a config on which no weight's shape depends."""
_CGROUPS: Final = Path("/sys/fs/cgroup")


@runtime_checkable
class Weight(Protocol):
    """What is asked of a parameter or buffer; one on torch's meta device has it too."""

    @property
    def shape(self) -> Iterable[int]:
        """Its sizes."""
        ...

    @property
    def nbytes(self) -> int:
        """What it takes [bytes]."""
        ...


def check_room(
    weights: Mapping[str, Weight], sizes: Mapping[str, Any], *, available: int | None = None
) -> None:
    """Refuse weights that are larger than the memory.

    Args:
        weights: every parameter and buffer by name, without memory.
        sizes: the settings that they follow from, for the message.
        available: memory that this process can get [bytes]; None asks the system.

    Raises:
        ResourceError: they do not fit.
    """
    available = available_bytes() if available is None else available
    needed = sum(weight.nbytes for weight in weights.values())
    if available is None or needed <= available:
        return
    name = max(weights, key=lambda name: weights[name].nbytes)
    shape = list(weights[name].shape)
    raise ResourceError(
        f"the weights of this model take {size_text(needed)}, but {size_text(available)} of memory are available. "
        f"The largest is {name} of shape {shape}; it follows from {_said(sizes, _behind(shape, sizes))}. Take the "
        f"config that belongs to the weights, lower the sizes, or give the process more memory"
    )


@contextmanager
def possible_shapes(sizes: Mapping[str, Any]) -> Iterator[None]:
    """Turn what torch says of shapes that no tensor can have into an error that names the settings.

    Raises:
        ConfigError: a tensor would be too large to be addressed.
    """
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        largest = sorted(_whole(sizes), key=lambda name: -sizes[name])[:3]
        raise ConfigError(
            f"no model can have these sizes: {_said(sizes, largest)} ({str(error).splitlines()[0]}). Take the "
            f"config that belongs to the weights, or lower the sizes"
        ) from error


def available_bytes() -> int | None:
    """Return how much more memory this process can get [bytes], swap included; None where Linux does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    told = {
        name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines)
    }
    limits = [told["MemAvailable"] + told.get("SwapFree", 0), *_cgroup_limits()]
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limits.append(most - pages * resource.getpagesize())
    return max(0, min(limits))


def _cgroup_limits() -> Iterator[int]:
    """Yield what each control group above this process leaves (version 2) [bytes]."""
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").partition("0::/")[2].strip()
    except OSError:
        return
    place = _CGROUPS / own
    for group in (place, *place.parents):
        try:
            most = (group / "memory.max").read_text(encoding="ascii").strip()
            used = int((group / "memory.current").read_text(encoding="ascii"))
            stat = (group / "memory.stat").read_text(encoding="ascii").split()
        except (OSError, ValueError):
            continue
        if most != "max":  # file pages that nobody uses are given back when memory is short
            yield int(most) - used + int(stat[stat.index("inactive_file") + 1])


def _whole(sizes: Mapping[str, Any]) -> list[str]:
    return [name for name, v in sizes.items() if type(v) is int and v > 1 and name not in _NO_SIZES]


def _behind(shape: list[int], sizes: Mapping[str, Any]) -> list[str]:
    """Return the settings that a shape probably comes from: equal to a dimension, or its largest factor."""
    names: list[str] = []
    whole = _whole(sizes)
    for dim in shape:
        equal = [name for name in whole if sizes[name] == dim]
        factors = sorted((n for n in whole if dim % sizes[n] == 0), key=lambda n: -sizes[n])
        names += equal or factors[:1]
    return [*dict.fromkeys([*names, *(n for n in whole if n == "num_hidden_layers")])]


def _said(sizes: Mapping[str, Any], names: Iterable[str]) -> str:
    return ", ".join(f"{name}={sizes[name]}" for name in names)

"""Groups of ranks, by name: operators carry names, because graphs hold no groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..errors import bad, wrong_type
from ..torch_compat import constant_in_graphs, process_group_named

#: by name: the groups of calls, and their records, for a torch that does not find them by name.
#: While a call is traced, the object in its place may stand for a group and have no collectives
_known: dict[str, tuple[ProcessGroup, Group]] = {}
#: between the names of the groups of a grid
_BETWEEN = " x "


class Group(NamedTuple):
    """A group as one of its ranks sees it.

    A grid is a mesh of two dimensions: keys are distributed over the first, heads over the second.
    It has no process group of its own. Rank ``k * heads + h`` is rank k of a group of the first
    dimension and rank h of one of the second.
    """

    name: str
    rank: int
    size: int
    #: this rank's groups of keys and of heads, in a grid
    parts: tuple[Group, ...] = ()
    #: dimensions with several ranks, of a mesh of two: "keys", "heads" or "heads x keys"
    axes: str = ""

    @property
    def process_group(self) -> ProcessGroup:
        return process_group_named(self.name) or _known[self.name][0]

    def at(self, rank: int) -> Group:
        """Return the group as another of its ranks would see it, for plans."""
        if not self.parts:
            return self._replace(rank=rank)
        keys, heads = self.parts
        return grid(keys.at(rank // heads.size), heads.at(rank % heads.size))


def grid(keys: Group, heads: Group) -> Group:
    """Return the group of two dimensions, or of one if the other has a single rank."""
    if heads.size == 1:
        return keys._replace(axes="keys")
    if keys.size == 1:
        return heads._replace(axes="heads")
    name, rank = keys.name + _BETWEEN + heads.name, keys.rank * heads.size + heads.rank
    return Group(name, rank, keys.size * heads.size, (keys, heads), "heads x keys")


@constant_in_graphs
def group_of(mesh: DeviceMesh | ProcessGroup | None) -> Group:
    """Return the group of a mesh of one or two dimensions, of a process group, or the default one.

    Raises:
        TypeError, ValueError: anything else, or a group that this process is no rank of.
    """
    want = "a DeviceMesh of one dimension or two, a ProcessGroup, or None for the default group"
    if mesh is None:
        if not dist.is_initialized():
            hint = "; call torch.distributed.init_process_group first"
            raise bad("mesh", "None without a default group", want + hint)
        group: Any = dist.group.WORLD
    elif isinstance(mesh, DeviceMesh):
        if mesh.ndim == 2:
            return grid(*(_group(mesh.get_group(axis)) for axis in range(2)))
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            hint = (
                f", such as mesh[{names[-1]!r}] or mesh[{names[-2]!r}, {names[-1]!r}]"
                if names
                else ""
            )
            raise bad("mesh", f"{mesh.ndim} dimensions", f"one or two{hint}")
        group = mesh.get_group()
    elif isinstance(mesh, ProcessGroup):
        group = mesh
    else:
        raise wrong_type("mesh", type(mesh).__name__, want)
    return _group(group)


def _group(group: Any) -> Group:
    known = _known.get(getattr(group, "group_name", ""))
    if known is None or known[0] is not group:  # torch's checks take 30 us
        rank = dist.get_rank(group)
        if rank < 0:
            raise bad("mesh", "a group without this process", "a group that it is a rank of")
        known = group, Group(group.group_name, rank, dist.get_world_size(group))
        _known[group.group_name] = known
    return known[1]


def group_named(name: str) -> Group:
    """Return a group that ``group_of`` has returned before."""
    if _BETWEEN in name:
        keys, heads = map(group_named, name.split(_BETWEEN))
        return grid(keys, heads)
    return _group(process_group_named(name) or _known[name][0])

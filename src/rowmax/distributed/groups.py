"""Groups of ranks, by name: operators carry names, because graphs hold no groups."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..errors import bad, wrong_type
from ..torch_compat import constant_in_graphs, process_group_named

#: the groups of calls, for a torch that does not find them by name. While a call is traced, the
#: object in its place may stand for a group and have no collectives
_groups: dict[str, ProcessGroup] = {}


class Group(NamedTuple):
    """A group as one of its ranks sees it."""

    name: str
    rank: int
    size: int

    @property
    def process_group(self) -> ProcessGroup:
        return process_group_named(self.name) or _groups[self.name]


@constant_in_graphs
def group_of(mesh: DeviceMesh | ProcessGroup | None) -> Group:
    """Return the group of a mesh of one dimension, of a process group, or the default group.

    Raises:
        TypeError, ValueError: anything else, or a group that this process is no rank of.
    """
    want = "a DeviceMesh of one dimension, a ProcessGroup, or None for the default group"
    if mesh is None:
        if not dist.is_initialized():
            hint = "; call torch.distributed.init_process_group first"
            raise bad("mesh", "None without a default group", want + hint)
        group: Any = dist.group.WORLD
    elif isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names
            hint = f", such as mesh[{names[-1]!r}]" if names else ""
            raise bad("mesh", f"{mesh.ndim} dimensions", f"one{hint}")
        group = mesh.get_group()
    elif isinstance(mesh, ProcessGroup):
        group = mesh
    else:
        raise wrong_type("mesh", type(mesh).__name__, want)
    rank = dist.get_rank(group)
    if rank < 0:
        raise bad("mesh", "a group without this process", "a group that it is a rank of")
    name = group.group_name
    _groups[name] = group
    return Group(name, rank, dist.get_world_size(group))


def group_named(name: str) -> Group:
    """Return a group that ``group_of`` has returned before."""
    group = process_group_named(name) or _groups[name]
    return Group(name, dist.get_rank(group), dist.get_world_size(group))

"""A bound on staleness, for any asynchronous rule: fast nodes wait before slow ones become stale.

Every live node will hand in some day. In the best order, the oldest base first, the r-th of them
will be merged r versions from now. A submission may be merged now only if, after it, that
order still keeps everyone within the bound; otherwise it is held until others have handed in.
The oldest may always go, so somebody always can; and a bound below the number of nodes minus
one cannot be kept at all.
"""

from collections.abc import Mapping


def may_merge(node: int, version: int, bases: Mapping[int, int], bound: int) -> bool:
    """Tell whether a node's submission may be merged now without making another one too stale.

    Args:
        node: whose submission it is.
        version: the current one.
        bases: what each live node trains from, or trained what it has handed in.
        bound: the staleness that no merged submission may exceed.
    """
    others = sorted(base for other, base in bases.items() if other != node)
    return all(version + 1 + place - base <= bound for place, base in enumerate(others))


def least_bound(nodes: int) -> int:
    """Return the smallest bound that can be kept with so many nodes."""
    return max(0, nodes - 1)

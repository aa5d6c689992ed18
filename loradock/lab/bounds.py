"""Lower bounds on the load time of any policy, also of those that know all later requests.

Between two requests for an adapter its bytes are either kept, which saves a load, or not. While a
request is served, its adapter and all that is kept share the memory. Whoever evicts decides for
each gap between requests wholly; a bound can keep a part of an adapter and save that part of the
load (Berger, Beckmann and Harchol-Balter, Practical Bounds on Optimal Caching with Variable Object
Sizes, SIGMETRICS 2018). Here an adapter can't be bypassed, so its bytes are taken from what others
can have at its requests.

- `foo_ns`: the least load time of fractional decisions, a linear program (FOO). Its constraints say
  what is kept at one request from what was kept at the previous one, so they grow with the number
  of requests alone. If all sizes are equal, it is what Belady's policy takes.
- `pfoo_ns`: only the sum of bytes x requests is bounded, so that sorting suffices (PFOO-L).
"""

from typing import Final, NamedTuple

from loradock.lab.workloads import Workload

_FOO_REQUESTS_MAX: Final = 50_000


class Bound(NamedTuple):
    """A lower bound on the load time of all requests, in nanoseconds, and its kind."""

    load_ns: int
    kind: str


class _Gap(NamedTuple):
    """Two successive requests for an adapter, given as places in the sequence."""

    first: int
    last: int
    adapter: int


def offline_bound(workload: Workload, capacity_bytes: int) -> Bound:
    """Return FOO's bound if scipy is installed and can do it in seconds, otherwise PFOO-L's."""
    try:
        if len(workload.requests) <= _FOO_REQUESTS_MAX:
            return Bound(foo_ns(workload, capacity_bytes), "FOO")
    except ModuleNotFoundError:
        # Without scipy, an extra of the package, the other bound is shown with its name.
        pass
    return Bound(pfoo_ns(workload, capacity_bytes), "PFOO-L")


def _gaps(workload: Workload) -> list[_Gap]:
    last: dict[int, int] = {}
    found = []
    for place, request in enumerate(workload.requests):
        if request.adapter in last:
            found.append(_Gap(last[request.adapter], place, request.adapter))
        last[request.adapter] = place
    return found


def _total_ns(workload: Workload) -> int:
    """Return the load time if nothing is ever kept."""
    return sum([workload.load_ns(request.adapter) for request in workload.requests])


def foo_ns(workload: Workload, capacity_bytes: int) -> int:
    """Return FOO's bound, computed by HiGHS; needs scipy.

    The variables are the kept part of each gap, and the bytes that are kept at each request.
    """
    # An extra of the package.
    from scipy.optimize import linprog  # noqa: PLC0415
    from scipy.sparse import csr_array  # noqa: PLC0415

    gaps, count = _gaps(workload), len(workload.requests)
    sizes = [workload.size_bytes(request.adapter) / capacity_bytes for request in workload.requests]
    # (request, variable, factor): kept[n] - kept[n - 1] - begun[n - 1] + ended[n] = 0.
    cells = [(place, len(gaps) + place, 1.0) for place in range(count)]
    cells += [(place, len(gaps) + place - 1, -1.0) for place in range(1, count)]
    for number, gap in enumerate(gaps):
        cells.append((gap.last, number, sizes[gap.last]))
        cells.append((gap.first + 1, number, -sizes[gap.first]))
    rows, columns, factors = zip(*cells, strict=True)
    worth_s = [workload.load_ns(gap.adapter) / 1e9 for gap in gaps]
    solved = linprog(
        [-worth for worth in worth_s] + [0.0] * count,
        A_eq=csr_array((factors, (rows, columns)), shape=(count, len(gaps) + count)),
        b_eq=[0.0] * count,
        bounds=[(0.0, 1.0)] * len(gaps) + [(0.0, max(0.0, 1 - size)) for size in sizes],
        method="highs",
    )
    if not solved.success:
        raise RuntimeError(f"HiGHS found no bound: {solved.message}")
    return _total_ns(workload) + int(1e9 * solved.fun)


def pfoo_ns(workload: Workload, capacity_bytes: int) -> int:
    """Return PFOO-L's bound: the gaps are kept that save the most per byte and request."""
    left = sum(
        [max(0, capacity_bytes - workload.size_bytes(one.adapter)) for one in workload.requests]
    )
    priced = []
    for gap in _gaps(workload):
        taken = workload.size_bytes(gap.adapter) * (gap.last - gap.first - 1)
        worth_ns = workload.load_ns(gap.adapter)
        priced.append((taken / worth_ns, taken, worth_ns))
    saved_ns = 0.0
    for _, taken, worth_ns in sorted(priced):
        if taken > left:
            saved_ns += worth_ns * left / taken
            break
        saved_ns += worth_ns
        left -= taken
    return _total_ns(workload) - int(saved_ns)

"""Where the rows of ranks lie, for hosts of any size; the copies themselves are tested with the elastic states."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from hvd_cluster.ops.rank_copies import RowPlaces


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.data())
def test_each_row_lies_on_as_many_other_hosts_as_asked(counts, data):
    bounds = [0, *accumulate(counts)]
    groups = [list(range(start, stop)) for start, stop in pairwise(bounds)]
    redundancy = data.draw(st.integers(0, len(groups) - 1))
    places = RowPlaces(groups, redundancy)
    host_of = {member: number for number, group in enumerate(groups) for member in group}
    for member, host in host_of.items():
        receivers = places.receivers(member)
        hosts = {host_of[each] for each in receivers}
        assert len(receivers) == len(hosts) == redundancy
        assert host not in hosts
        assert all(member in places.senders(each) for each in receivers)
        kept_on = {host_of[each] for each in host_of if member in places.on_host(each)}
        assert kept_on == {host, *hosts}

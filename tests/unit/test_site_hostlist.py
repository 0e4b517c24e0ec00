"""Host lists: order as written, padding of each bound kept, exact round trip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.site.hostlist import HostlistError, expand, fold


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu-[001-003,020]", ["gpu-001", "gpu-002", "gpu-003", "gpu-020"]),
        ("srv01,srv3", ["srv01", "srv3"]),  # padding belongs to each name
        ("rack2-[09-11]", ["rack2-09", "rack2-10", "rack2-11"]),
        ("n[098-101,7]", ["n098", "n099", "n100", "n101", "n7"]),
        ("z-[3,1,2],a", ["z-3", "z-1", "z-2", "a"]),  # addresses are paired by order
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
        ("r[1-2][3-4]", ["r13", "r14", "r23", "r24"]),
        ("even[02-06/2]", ["even02", "even04", "even06"]),
        ("node[1-2]-ib", ["node1-ib", "node2-ib"]),
        ("k8s-head-01, gpu-rack1-n01", ["k8s-head-01", "gpu-rack1-n01"]),  # a hyphen is part of a name
        ("01002", ["01002"]),
        ("10.1.0.[9-11]", ["10.1.0.9", "10.1.0.10", "10.1.0.11"]),
        ("2001:db8::[21-22]", ["2001:db8::21", "2001:db8::22"]),
    ],
)
def test_expands_in_the_order_as_written(text: str, names: list[str]) -> None:
    assert expand(text) == names


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no names"),
        ("  ", "no names"),
        ("a,,b", "comma"),
        ("a,", "comma"),
        ("a b", "separated by commas"),
        ("gpu-[1-4", "bracket"),
        ("gpu-1]", "bracket"),
        ("gpu-[[1]]", "bracket"),
        ("gpu-[]", "neither a number nor a range"),
        ("gpu-[a-c]", "neither a number nor a range"),
        ("gpu-[-5]", "neither a number nor a range"),
        ("gpu-[4-1]", "backwards"),
        ("gpu-[1-4/0]", "no step"),
        ("gpu-[8-011]", "different widths"),
        ("gpu-[001-10]", "different widths"),
        ("@all", "cannot be part"),
        ("a!b", "cannot be part"),
        ("a/2", "cannot be part of a name"),
        ("gpu-[1-2],x,gpu-2", '"gpu-2" stands twice'),
        ("a[1-99999999]", "more than 65536"),
        ("a[1-1000][1-1000]", "more than 65536"),
        ("a[1-9999999999999999999999]", "neither a number nor a range"),
    ],
)
def test_refuses_what_it_cannot_read(text: str, why: str) -> None:
    with pytest.raises(HostlistError, match=why.replace("[", r"\[")):
        expand(text)


def test_folds_mixed_padding_without_inventing_names() -> None:
    names = ["c-001", "c-002", "c-010", "c-0100", "r1-n01", "r1-n02", "r2-n01", "login"]
    folded = fold(names)
    assert "c-[001-002,010,0100]" in folded
    assert sorted(expand(folded)) == sorted(names)


def test_refuses_to_fold_what_is_no_name() -> None:
    with pytest.raises(HostlistError, match="not a host name"):
        fold(["gpu-[1-2]"])


name = st.from_regex(r"[a-z]{1,3}(-?[0-9]{1,4}){0,2}(-[a-z]{1,2})?", fullmatch=True)


@given(st.lists(name, unique=True, min_size=1, max_size=60))
def test_fold_and_expand_are_a_round_trip(names: list[str]) -> None:
    assert sorted(expand(fold(names))) == sorted(names)


@given(st.lists(name, unique=True, min_size=1, max_size=20))
def test_a_plain_list_keeps_its_order(names: list[str]) -> None:
    assert expand(",".join(names)) == names


@given(st.text(alphabet="a1[]-,/ 0.:@é", max_size=40))
def test_any_text_gives_distinct_names_or_one_error(text: str) -> None:
    try:
        names = expand(text)
    except HostlistError:
        return
    assert names
    assert len(names) == len(set(names))

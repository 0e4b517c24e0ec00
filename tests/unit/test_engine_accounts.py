"""Users and groups: only what differs is commanded."""

from __future__ import annotations

from provision.engine.accounts import Group, User, commands, parse

PASSWD = "root:x:0:0:root:/root:/bin/bash\nann:x:2001:3000:Ann:/home/ann:/bin/sh\n"
GROUP = "root:x:0:\nteam:x:3000:\ndocker:x:900:bob\n"
NOW = parse(PASSWD, GROUP)


def test_accounts_that_are_right_need_nothing() -> None:
    user = User("ann", 2001, group="team", home="/home/ann", shell="/bin/sh")
    assert commands(NOW, [Group("team", 3000)], [user]) == []


def test_what_is_missing_is_made() -> None:
    assert commands(
        NOW, [Group("new", 4000)], [User("bea", 2002, group="new", groups=("team",), shell="/bin/bash")]
    ) == [
        "groupadd -g 4000 new",
        "useradd -M -u 2002 -g new -s /bin/bash -G team bea",
    ]


def test_only_the_properties_that_differ_are_changed_and_memberships_of_others_stay() -> None:
    user = User("ann", 2005, group="team", groups=("docker",), shell="/bin/bash")
    assert commands(NOW, [], [user]) == ["usermod -u 2005 -s /bin/bash -a -G docker ann"]


def test_a_group_with_another_id_is_changed() -> None:
    assert commands(NOW, [Group("team", 3001)], []) == ["groupmod -g 3001 team"]


def test_names_with_shell_characters_are_quoted() -> None:
    assert commands(NOW, [], [User("eve", comment="x; rm -rf /")]) == ["useradd -M -U -c 'x; rm -rf /' eve"]

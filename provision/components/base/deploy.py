"""Brings a node to what every node of a cluster has before anything else is installed on it."""

from __future__ import annotations

import shlex
from shlex import quote

from provision.components.base import exports
from provision.components.base.settings import BaseSettings
from provision.engine import ops
from provision.engine.deploy import Context, step

# sshd must go on looking where it has looked until now, or people whose keys are elsewhere are locked out.
_KEYS_WHERE_THEY_WERE = f"""sshd -t -f {{}} && {{ [ -e {exports.KEYS_DROP_IN} ] ||
case $(sshd -T | sed -n 's/^authorizedkeysfile //p') in
  .ssh/authorized_keys|'.ssh/authorized_keys .ssh/authorized_keys2') ;;
  *) echo "sshd_config has an AuthorizedKeysFile of its own: remove it, or leave out base.users.*.keys" >&2; false;;
esac; }}"""


@step("*")
def node(on: Context) -> None:
    """First the package database, on which everything else stands."""
    base = on.settings(BaseSettings)
    ops.ensure(
        "packages whole",
        test=on.profile.manager.whole,
        make=on.profile.manager.make_whole,
        timeout=1800,
    )
    _names(on)
    _place(on, base)
    _accounts(on, base)
    _kernel(on, base)
    _limits(base)
    ops.file(exports.JOURNAL, exports.journal(base))
    ops.unit("systemd-journald", reads=[exports.JOURNAL])
    ops.ensure(  # a journal that was kept in memory until now moves to disk at the next boot only, unless told to
        "journal on disk",
        test="[ -e /var/log/journal/$(cat /etc/machine-id)/system.journal ]",
        make="journalctl --flush",
    )
    _holds(on, base)


def _names(on: Context) -> None:
    name = on.node.name
    # Where cloud-init is installed it would write both files again at the next boot.
    ops.file(exports.CLOUD, "preserve_hostname: true\nmanage_etc_hosts: false\n")
    ops.file(exports.HOSTS, exports.hosts(on.site, on.node))
    ops.file("/etc/hostname", f"{name}\n", comment=None)
    ops.ensure("host name", test=f'[ "$(hostname)" = {quote(name)} ]', make=f"hostname {quote(name)}")


def _place(on: Context, base: BaseSettings) -> None:
    zone = quote(f"/usr/share/zoneinfo/{base.timezone}")
    name = quote(base.timezone)
    ops.packages(*on.profile.packages("timezone"))
    ops.ensure(  # /etc/timezone is kept by some releases only, and must agree where it is
        f"time zone {base.timezone}",
        test=f'[ "$(readlink -f /etc/localtime)" = "$(readlink -f {zone})" ] && [ -e {zone} ] && '
        f'{{ [ ! -e /etc/timezone ] || [ "$(cat /etc/timezone)" = {name} ]; }}',
        make=f'[ -e {zone} ] || {{ echo "there is no time zone {base.timezone}" >&2; exit 1; }}; '
        f"ln -sfnT {zone} /etc/localtime; [ ! -e /etc/timezone ] || echo {name} >/etc/timezone",
    )
    if base.locale != "C.UTF-8":
        language, _, charset = base.locale.partition(".")
        ops.packages(*on.profile.packages("locale"))
        ops.ensure(
            f"locale {base.locale}",
            test=f"locale -a | grep -qix {quote(base.locale.replace('UTF-8', 'utf8'))}",
            # in a folder of its own: the archive is made anew by the distribution's locale-gen
            make=f"localedef --no-archive -i {quote(language)} -f {quote(charset)} {quote(base.locale)}",
        )
    ops.file(on.profile.path("locale"), f"LANG={base.locale}\n")


def _accounts(on: Context, base: BaseSettings) -> None:
    users = exports.users(on.site)
    if users or base.groups:
        ops.accounts(groups=exports.groups(on.site), users=users)
    if base.absent_users:
        names = shlex.join(base.absent_users)
        ops.ensure(
            f"no users {' '.join(base.absent_users)}",
            test=f"for u in {names}; do ! getent passwd $u >/dev/null || exit 1; done",
            make=f"for u in {names}; do ! getent passwd $u >/dev/null || userdel $u || exit 1; done",
        )
    if not on.site.enabled("storage") and users:  # otherwise the storage server makes them
        homes = "\n".join(f"{user.name} {user.group} {user.home}" for user in users)
        each = "while read -r u g h; do [ -d $h ] || {} || exit 1; done <<'EOF'\n" + homes + "\nEOF"
        ops.ensure(
            "homes",
            test=each.format("false"),
            make=each.format(
                # other nodes may do the same at this moment, where homes are shared by something of the site's own
                "{ mkdir -p $(dirname $h) && if mkdir $h; then "
                "cp -rT /etc/skel $h && chown -R $u:$g $h && chmod 700 $h; else [ -d $h ]; fi; }"
            ),
        )
    _keys(on)
    rights = exports.sudoers(base)
    if rights is None:
        ops.absent(exports.SUDOERS)
    else:
        ops.packages(*on.profile.packages("sudo"))
        ops.file(exports.SUDOERS, rights, mode="440", validate="visudo -cqf {}")


def _keys(on: Context) -> None:
    keys = exports.keys(on.site)
    if not keys:
        ops.absent(exports.KEYS_DROP_IN)
    else:
        ops.directory(exports.KEYS)
        for name, content in keys.items():
            ops.file(f"{exports.KEYS}/{name}", content)
        ops.file(
            exports.KEYS_DROP_IN,
            f"AuthorizedKeysFile {exports.KEYS_FILES}\n",
            validate=f"({_KEYS_WHERE_THEY_WERE})",
        )
    wanted = shlex.join(sorted(keys))
    ops.ensure(  # keys of those who left
        "no other keys",
        test=f"[ ! -d {exports.KEYS} ] || for f in $(ls {exports.KEYS}); do "
        f"case ' {wanted} ' in *\" $f \"*) ;; *) exit 1;; esac; done",
        make=f"for f in $(ls {exports.KEYS}); do "
        f"case ' {wanted} ' in *\" $f \"*) ;; *) rm {exports.KEYS}/$f;; esac; done",
    )
    ops.unit(on.profile.unit("ssh"), reads=[exports.KEYS_DROP_IN], reload=True)


def _kernel(on: Context, base: BaseSettings) -> None:
    ops.sysctl(exports.sysctl(base), optional=exports.unasked(base))
    if base.swap == "off":
        if reason := on.limited("swap"):
            ops.skip("swap off", reason)
        else:
            ops.unit("swap.target", masked=True)
            ops.ensure("swap off", test='[ "$(wc -l </proc/swaps)" -le 1 ]', make="swapoff -a")
    if base.governor == "keep":
        ops.absent(exports.GOVERNOR)
    elif reason := on.limited("governor"):
        ops.skip(f"governor {base.governor}", reason)
    else:
        files = "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"
        ops.file(exports.GOVERNOR, f"w {files} - - - - {base.governor}\n")
        ops.ensure(
            f"governor {base.governor}",
            test=f"for f in {files}; do [ ! -e $f ] || [ $(cat $f) = {base.governor} ] || exit 1; done",
            make=f"systemd-tmpfiles --create {exports.GOVERNOR}",
        )


def _limits(base: BaseSettings) -> None:
    ops.file(exports.LIMITS, exports.limits(base))
    wanted = exports.manager_limits(base)
    ops.file(exports.MANAGER, "[Manager]\n" + "".join(f"{key}={value}\n" for key, value in wanted.items()))
    shown = "".join(f"{key}={value}\n" for key, value in sorted(wanted.items())).strip()
    properties = " ".join(f"-p {key}" for key in wanted)
    ops.ensure(
        "limits of services",
        test=f'[ "$(systemctl show {properties} | sort)" = {quote(shown)} ]',
        make="systemctl daemon-reexec",
    )


def _holds(on: Context, base: BaseSettings) -> None:
    paths = exports.hold_paths(on.profile)
    if paths is None:
        ops.skip("held packages", f"{on.profile.key}: packages cannot be held by pattern")
        return
    preferences, unattended = paths
    ops.file(preferences, exports.apt_preferences(base))
    ops.file(unattended, exports.unattended_upgrades(base), comment="//")

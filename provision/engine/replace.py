"""How a file of a node is written: whole or not at all, and never readable to others on the way."""

from __future__ import annotations

from shlex import quote


def replace(path: str, *, mode: str, owner: str | None = None, check: str = ":") -> str:
    """Shell text that puts its standard input in place of the file `path`; a missing folder is made, mode 755.

    `check` is shell text about the new file, "$t", which lies beside the old one: where it fails, or leaves by `exit`,
    the old one stays. `owner` is "user:group", None whoever runs it.
    """
    quoted = quote(path)
    owned = f'chown {quote(owner)} "$t"; ' if owner is not None else ""
    return f"""set -e; umask 077; d=$(dirname -- {quoted})
[ -d "$d" ] || (umask 022; mkdir -p "$d")
t=$(mktemp "$d/.provision.XXXXXX"); trap 'rm -f "$t"' EXIT
cat >"$t"; {check}; {owned}chmod {mode} "$t"; sync "$t"
mv -fT -- "$t" {quoted}; sync "$d"
[ ! -x /usr/sbin/restorecon ] || /usr/sbin/restorecon {quoted}"""

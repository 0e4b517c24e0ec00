# Functions about the packages of one version. Given are $version, $members, $apart, $log and `wanted`, which prints lines
# NAME PATTERN; `installed`, which prints lines NAME VERSION, is the package manager's.
set -u
set -f # patterns are for names and versions, not for files

is() { # NAME PATTERN...
  word=$1
  shift
  for pattern; do
    # shellcheck disable=SC2254 # it is a pattern
    case $word in $pattern) return 0 ;; esac
  done
  return 1
}

belongs() { is "$1" $members && ! is "$1" $apart; } # NAME

# Installed packages that belong to the set and whose version looks like a driver's.
present() {
  installed | while read -r name have; do
    case $have in
      [1-9][0-9][0-9].*) ! belongs "$name" || echo "$name $have" ;;
    esac
  done
}

# Those of another version that are not wanted by name.
foreign() {
  present | while read -r name have; do
    is "$have" "$version" || wanted | grep -q "^$name " || echo "$name"
  done
}

keep_log() { # of the kernel module that was built last
  last=$(set +f; ls -t /var/lib/dkms/*/*/build/make.log 2>/dev/null | head -n 1)
  [ -z "$last" ] || install -D -m 644 "$last" "$log"
}

right() { # all that is wanted is installed in its version, and nothing of another
  all=$(installed) || exit 2
  wanted | {
    while read -r name want; do
      printf '%s\n' "$all" | {
        while read -r known have; do
          if [ "$known" = "$name" ] && is "$have" "$want"; then exit 0; fi
        done
        echo "$name $want is not installed" >&2
        exit 1
      } || exit 1
    done
  } || return 1
  others=$(foreign)
  [ -z "$others" ] || {
    echo "of another version: $others" >&2
    return 1
  }
}

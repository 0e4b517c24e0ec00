# One transaction, simulated first. A kernel module that does not build fails the package that builds it: then what there
# was before is put back, dpkg is whole, and the log of the build is kept.
installed() {
  known=$(dpkg-query -W -f='${db:Status-Status} ${Package} ${Version}\n') || return 2
  printf '%s\n' "$known" | sed -n 's/^installed //p'
}

there() { # names of all packages that are on the disk in whatever state
  dpkg-query -W -f='${db:Status-Status} ${Package}\n' | grep -Ev '^(config-files|not-installed) ' | cut -d ' ' -f 2
}

offered() { apt-cache madison "$1" | cut -d '|' -f 2 | tr -d ' '; }

pick() { # NAME PATTERN: the newest version that matches
  offered "$1" | while read -r one; do
    if is "$one" "$2"; then
      echo "$one"
      break
    fi
  done
}

plan() { # the arguments of apt-get install
  wanted | {
    while read -r name want; do
      found=$(pick "$name" "$want")
      [ -n "$found" ] || {
        echo "the package sources offer no $name $want, but: $(offered "$name" | tr '\n' ' ')" >&2
        exit 1
      }
      echo "$name=$found"
    done
  } || return 1
  foreign | while read -r name; do
    found=$(pick "$name" "$version")
    if [ -n "$found" ]; then echo "$name=$found"; else echo "$name-"; fi
  done
}

exactly() { apt --allow-downgrades --allow-change-held-packages install "$@"; }

back() {
  keep_log
  new=$(there | while read -r name; do
    if belongs "$name" || wanted | grep -q "^$name "; then
      case " $before" in *" $name="*) ;; *) echo "$name-" ;; esac
    fi
  done)
  # shellcheck disable=SC2086 # words
  [ -z "$before$new" ] || exactly $before $new >&2
  echo "not installed; what there was before is there again" >&2
  exit 1
}

args=$(plan 2>/dev/null) || { update && args=$(plan); } || exit 1
before=$(present | while read -r name have; do printf '%s=%s ' "$name" "$have"; done)
# shellcheck disable=SC2086 # words
said=$(exactly -s $args 2>&1) || {
  printf '%s\n' "$said" >&2
  exit 1
}
rm -f "$log"
# shellcheck disable=SC2086 # words
exactly $args >&2 || back

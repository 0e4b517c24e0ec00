installed() {
  known=$(dpkg-query -W -f='${db:Status-Status} ${Package} ${Version}\n') || return 2
  printf '%s\n' "$known" | sed -n 's/^installed //p'
}
right || exit 1

installed() {
  dpkg-query -W -f='${db:Status-Status} ${Package} ${Version}\n' | sed -n 's/^installed //p'
}
right || exit 1

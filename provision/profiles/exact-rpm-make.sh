installed() { rpm -qa --qf '%{NAME} %{VERSION}-%{RELEASE}\n'; }

specs=$(wanted | while read -r name want; do
  if [ "$want" = '*' ]; then echo "$name"; else echo "$name-$want"; fi
done)
rm -f "$log"
# shellcheck disable=SC2086 # words
dnf -q -y --setopt=install_weak_deps=False --disableplugin=versionlock --allowerasing \
  install -- $specs >&2 || exit 1
others=$(foreign)
# shellcheck disable=SC2086 # words
[ -z "$others" ] || dnf -q -y remove -- $others >&2 || exit 1
keep_log

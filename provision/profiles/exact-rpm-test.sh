installed() { rpm -qa --qf '%{NAME} %{VERSION}-%{RELEASE}\n'; }
right || exit 1

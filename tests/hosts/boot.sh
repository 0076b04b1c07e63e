# What a host of tests/hosts does in its own namespaces: it makes the machine look like one of its own, starts sshd, says
# "ready" and lives until its standard input is closed. Bash as the first process reaps what is left behind.
# Arguments: its name, its folder, then the paths of the machine that stay visible although /tmp is its own.
set -euo pipefail
name=$1 folder=$2
shift 2

hostname "$name"
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir /run/sshd
index=0
for path in "$@"; do
    index=$((index + 1))
    mkdir -p "/run/visible/$index"
    mount --bind "$path" "/run/visible/$index"
done
mount -t tmpfs -o mode=1777 tmpfs /tmp
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
index=0
for path in "$@"; do
    index=$((index + 1))
    mkdir -p "$path"
    mount --move "/run/visible/$index" "$path"
done
for file in hosts passwd shadow; do
    mount --bind "$folder/etc/$file" "/etc/$file"
done
[ ! -e /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
ip link set lo up
"$(command -v sshd)" -f "$folder/etc/sshd_config" -E "$folder/sshd.log"
echo ready
read -r || true

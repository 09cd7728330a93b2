#!/bin/sh
# The first process of a guest with two stores in it, each with its ordinary promise: what it has acknowledged is on its disk.
export PATH=/usr/bin:/usr/sbin LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mkdir -p /dev/shm && mount -t tmpfs shm /dev/shm
chmod 1777 /tmp /dev/shm
option() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
stty -F /dev/ttyS0 raw -echo 2>/dev/null
ip link set lo up
ip link set eth0 up
ip addr add "$(option ip)" dev eth0
redis-server --daemonize yes --bind 0.0.0.0 --protected-mode no --save '' --appendonly yes --appendfsync always --dir /var/redis
su -s /bin/sh postgres -c '/usr/lib/postgresql/15/bin/postgres -D /var/data' >/dev/null 2>&1 &
# What was read to come this far is on the disk as well: with init_on_free a copy of the machine is the smaller without it.
(sleep 3; echo 3 >/proc/sys/vm/drop_caches) &

echo "BOOTED $(cut -d' ' -f1 /proc/uptime)"
exec /sbin/witness

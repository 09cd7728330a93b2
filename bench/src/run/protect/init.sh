#!/bin/sh
# The first process of a guest that is protected while it works; `load=` says at what.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
option() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
stty -F /dev/ttyS0 raw -echo 2>/dev/null
busybox ip link set lo up
busybox ip link set eth0 up
busybox ip addr add "$(option ip)" dev eth0
mkdir -p /tmp/shown
# How far the work is, for whoever measures: http://GUEST:81/done
busybox httpd -p 81 -h /tmp/shown
echo 0 >/tmp/shown/done

idle() { :; }
# Files and generated pages (web-page.c), from the packaged Apache.
apache() { mkdir -p /run/apache2 /run/lock && apache2ctl start; }
web() { apache; }
# The packaged redis, asked as fast as it answers by its own benchmark: sets and gets over 100,000 keys.
redis() {
    server
    until redis-cli ping >/dev/null; do sleep 1; done
    redis-benchmark -l -q -r 100000 -d 64 -c 20 -t set,get
}
# The same, for clients outside. Its log travels with its disk.
server() {
    mkdir -p /var/tmp/redis
    redis-server --daemonize yes --bind 0.0.0.0 --protected-mode no --save '' --appendonly yes --dir /var/tmp/redis
}
# Sources of some size, each with other names in it.
compile() {
    mkdir -p /var/tmp/work && cd /var/tmp/work || exit 1
    round=0
    while :; do
        round=$((round + 1))
        { echo 'int printf(const char*, ...);'; seq 1 30 | sed "s/.*/int f${round}_&(int x){return printf(\"%d\",x*&);}/"; } >part.c
        gcc -O2 -c part.c -o "part$((round % 8)).o"
        echo $round >/tmp/shown/done
    done
}
ep() { compute ep /tmp/shown/done; }
is() { compute is /tmp/shown/done; }
"$(option load)" >/dev/null 2>&1 &

echo "BOOTED $(cut -d' ' -f1 /proc/uptime)"
exec /sbin/witness

#!/bin/sh
# The first process of a guest that is moved while it works; `load=` says at what.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
option() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
stty -F /dev/ttyS0 raw -echo 2>/dev/null
busybox ip link set lo up
busybox ip link set eth0 up
busybox ip addr add "$(option ip)" dev eth0

# Sources of some size, each with other names in it.
compile() {
    mkdir -p /var/tmp/work && cd /var/tmp/work || exit 1
    round=0
    while :; do
        round=$((round + 1))
        { echo 'int printf(const char*, ...);'; seq 1 400 | sed "s/.*/int f${round}_&(int x){return printf(\"%d\",x*&);}/"; } >part.c
        gcc -O2 -c part.c -o "part$((round % 8)).o"
    done
}
# A server of the files below /usr, and somebody who asks for one after another.
web() {
    busybox httpd -p 80 -h /usr
    find /usr -type f -size -200k | sed 's|^/usr||' >/tmp/files
    while :; do
        while read -r file; do busybox wget -q -O /dev/null "http://127.0.0.1$file"; done </tmp/files
    done
}
# A ring of processors that hand each other numbers: all in memory, no files.
simulation() {
    awk 'BEGIN { n = 200000; for (i = 0; i < n; i++) cell[i] = i * 7919 % 104729;
        for (step = 1; ; step++) for (i = 0; i < n; i++) cell[i] = (cell[i] + cell[(i * 31 + step) % n]) % 1000003 }'
}
"$(option load)" >/dev/null 2>&1 &

echo "BOOTED $(cut -d' ' -f1 /proc/uptime)"
exec /sbin/witness

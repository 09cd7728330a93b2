#!/bin/sh
# The first process of the Debian guest after its initial RAM disk.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp

option() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

stty -F /dev/ttyS0 raw -echo 2>/dev/null
busybox ip link set lo up
[ -e /sys/class/net/eth0 ] && busybox ip link set eth0 up
address=$(option ip)
[ -n "$address" ] && busybox ip addr add "$address" dev eth0

# Sources of some size, each round with other names in it, so that no round repeats the last one's pages.
compile() {
    round=0
    mkdir -p /var/tmp/work && cd /var/tmp/work || exit 1
    while :; do
        round=$((round + 1))
        for file in 1 2 3 4 5 6 7 8; do
            {
                echo '#include <stdio.h>'
                echo '#include <stdlib.h>'
                echo '#include <string.h>'
                seq 1 200 | sed "s/.*/int f${round}_${file}_&(int x){char b[64];snprintf(b,64,\"%d\",x*&);return strlen(b)+x;}/"
            } >"file$file.c"
            gcc -O2 -c "file$file.c" -o "file$file.o"
        done
    done
}
[ "$(option work)" = compile ] && compile &

echo "BOOTED $(cut -d' ' -f1 /proc/uptime)"
exec /sbin/witness

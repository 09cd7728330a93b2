#!/bin/sh
# The first process of the guest that works like somebody at a desk: writes, browses, calculates, mails, compiles, thinks.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
stty -F /dev/ttyS0 raw -echo 2>/dev/null

# A document is saved as programs do it: all of it, under another name.
write() {
    seq "$1" $(($1 + 400)) | sed 's/.*/& paragraphs were written here, and this is one of them, number &./' >>"doc$(($1 % 5))"
    cp "doc$(($1 % 5))" doc.new && mv doc.new "doc$(($1 % 5))"
}
# Pages come, are kept packed and unpacked, and the oldest go.
browse() {
    set -- "$1" "$(ls -d /usr/share/doc/* /usr/lib/gcc/x86_64-linux-gnu/*/include /usr/include/* | sed -n "$(($1 * 7 % 150 + 1))p")"
    tar cf - "$2" 2>/dev/null | gzip -1 >"cache/$1.gz"
    mkdir -p "cache/$1" && tar xzf "cache/$1.gz" -C "cache/$1" && grep -rc e "cache/$1" >/dev/null
    rm -rf "cache/$(($1 - 30))" "cache/$(($1 - 30)).gz"
}
calculate() {
    awk -v s="$1" 'BEGIN { for (i = 0; i < 60000; i++) cell[i] = (i * s) % 9973; for (i in cell) sum += cell[i]; print sum }' >>sheet
}
mail() {
    { echo "From someone $1"; head -c 6000 /dev/urandom | od -An -tx1; } >>mbox
    grep -c '^From ' mbox >inbox
}
compile() {
    { echo 'int printf(const char*, ...);'; seq 1 120 | sed "s/.*/int f$1_&(int x){return x*&+$1;}/"; } >part.c
    gcc -O1 -c part.c -o "part$(($1 % 4)).o"
}
work() {
    mkdir -p /var/desk/cache && cd /var/desk || exit 1
    round=0
    while :; do
        round=$((round + 1))
        write $round; browse $round; calculate $round; mail $round; compile $round; sleep 1
    done
}
work >/dev/null 2>&1 &

echo "BOOTED $(cut -d' ' -f1 /proc/uptime)"
exec /sbin/witness

#!/bin/busybox sh
# The first process of a test guest: devices, disk, address, then the test agent.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module"; done </modules/order

option() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

# The serial port carries requests as well as messages: no echo, no line editing.
stty -F /dev/ttyS0 raw -echo 2>/dev/null
# A disk appears a moment after its driver; without one this costs nothing, for the PCI bus was scanned already.
data=$(option data)
if [ -n "$data" ]; then
    # A partition gets its device name once the kernel has read the partition table.
    for _ in $(seq 100); do [ -e "/dev/$data" ] && break; sleep 0.1; done
    mount -t ext4 "/dev/$data" /mnt || echo "NO FILE SYSTEM ON $data"
elif [ -e /dev/vda ]; then
    mount -t ext4 /dev/vda /mnt 2>/dev/null
fi
ip link set lo up
[ -e /sys/class/net/eth0 ] && ip link set eth0 up
address=$(option ip)
case $address in
'') ;;
dhcp)
    mkdir -p /etc
    cat >/bin/lease <<'END'
#!/bin/sh
case $1 in bound | renew) ;; *) exit 0 ;; esac
ip addr replace "$ip/$mask" dev eth0
[ -n "$router" ] && ip route replace default via "$router"
echo "search $domain" >/etc/resolv.conf
for server in $dns; do echo "nameserver $server" >>/etc/resolv.conf; done
END
    chmod +x /bin/lease
    udhcpc -f -i eth0 -s /bin/lease -t 3 -T 1 -A 1 >/dev/null 2>&1 &
    ;;
*) ip addr add "$address" dev eth0 ;;
esac
echo "BOOTED $(cut -d' ' -f1 /proc/uptime)"
# With helper=on: the guest agent, and a shell on port 7070 through which tests look inside the guest.
if [ "$(option helper)" = on ]; then
    mkdir -p /etc /run
    for name in $(option allow | tr , ' '); do echo "allow $name"; done >/etc/whimbrel-guest.conf
    # Started again when a test has killed it.
    while :; do whimbrel-guest 2>/dev/console; sleep 1; done &
    printf '#!/bin/sh\nread -r line; eval "$line"; echo "exit $?"\n' >/bin/one-line
    chmod +x /bin/one-line
    nc -ll -p 7070 -e /bin/one-line &
fi
# Debian's qemu-ga, if the initial RAM disk has it.
if [ -x /usr/sbin/qemu-ga ]; then
    mkdir -p /etc /run /sbin /tmp /var/run /var/log
    # Without this program qemu-ga sets no clock.
    ln -s /bin/busybox /sbin/hwclock
    for port in /sys/class/virtio-ports/*; do
        [ "$(cat "$port/name")" = org.qemu.guest_agent.0 ] || continue
        while :; do /usr/sbin/qemu-ga -m virtio-serial -p "/dev/${port##*/}" -t /tmp -f /tmp/qemu-ga.pid 2>/dev/null; sleep 1; done &
    done
fi
munch=$(option munch)
# shellcheck disable=SC2086 # three words
for _ in $(seq "$(option munchers | grep . || echo 1)"); do
    [ -n "$munch" ] && muncher $(echo "$munch" | tr : ' ') &
done
exec /bin/witness

#!/bin/busybox sh
# Loads the drivers, mounts the disk and starts the init of the disk.
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t devtmpfs dev /dev
while read -r module; do /bin/busybox insmod "/modules/$module"; done </modules/order
tries=0
root=$(/bin/busybox sed -n 's/.*\broot=\([^ ]*\).*/\1/p' /proc/cmdline)
root=${root:-/dev/vda}
until [ -e "$root" ] || [ $tries -ge 100 ]; do tries=$((tries + 1)); /bin/busybox usleep 50000; done
/bin/busybox mount -t ext4 "$root" /root
/bin/busybox umount /proc
/bin/busybox mount -o move /dev /root/dev
exec /bin/busybox switch_root /root /sbin/whimbrel-init

#!/bin/busybox sh
# Loads drivers, mounts the disk of the image, and goes on with the first process there.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
$b mount -t devtmpfs dev /dev
while read -r module; do $b insmod "/modules/$module"; done </modules/order
tries=0
# A disk appears a moment after its driver.
until disk=$($b findfs LABEL=container 2>/dev/null); do
    tries=$((tries + 1))
    [ $tries -lt 500 ] || { echo "no disk with the files of the container image"; $b poweroff -f; }
    $b usleep 20000
done
$b mount -t ext4 "$disk" /root || $b poweroff -f
$b mkdir -p /root/dev
$b mount -o move /dev /root/dev
$b umount /proc /sys
exec $b switch_root /root /.whimbrel/init
